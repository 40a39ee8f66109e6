"""A mode of fake tensors that remembers says what PyTorch's own says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import lightning_plugin.fakes
from lightning_plugin.fakes import CachingFakeMode
from lightning_plugin.private import FakeTensor, FakeTensorMode, storage_key, tree_leaves

Case = Callable[[Tensor, Tensor], Any]

CASES: dict[str, Case] = {
    "pointwise": lambda x, w: (x * 2 + 1).relu(),
    "broadcast": lambda x, w: x - x.mean((2, 3), keepdim=True),
    "types": lambda x, w: x.to(torch.float64).sum() + x.half().mean(),
    "convolution": lambda x, w: functional.conv2d(x, w, stride=2, padding=1),
    "channels last": lambda x, w: functional.conv2d(x.to(memory_format=torch.channels_last), w),
    "pool": lambda x, w: functional.max_pool2d(x, 3, 2, return_indices=True),
    "statistics": lambda x, w: torch.var_mean(x, (0, 2, 3)),
    "norm in training": lambda x, w: functional.batch_norm(x, None, None, training=True),
    "norm in evaluation": lambda x, w: functional.batch_norm(x, torch.zeros(4), torch.ones(4)),
    "views": lambda x, w: (x[:, 1:, ::2], x.permute(0, 2, 3, 1), x.flatten(2), x.expand(2, -1, -1, -1), x[0, 0, 0]),
    "new from old": lambda x, w: (x.new_zeros(3), torch.empty_like(x), torch.zeros(2, 3, dtype=torch.long)),
    "several": lambda x, w: torch.cat([x, x], 1).chunk(3, 1),
    "written": lambda x, w: x.clone().add_(1).mul_(x),
    "resized": lambda x, w: x.detach().clone().resize_(3, 5),
    "a number": lambda x, w: x * torch.tensor(2.0) + torch.tensor(1.0) / 3,
    "positions": lambda x, w: x.flatten()[torch.arange(3)],
    "choice": lambda x, w: torch.where(x > 0, x, 0.0),
    "matrices": lambda x, w: functional.linear(x, torch.ones(3, 9)),
}


def told(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, t.untyped_storage().nbytes(), t.requires_grad


def run(mode: FakeTensorMode, case: Case) -> list[Any]:
    """What comes of a case forward and backward: sizes and memory, and which results share it."""
    with mode:
        x = torch.empty(1, 4, 8, 9, requires_grad=True)
        w = torch.empty(6, 4, 3, 3, requires_grad=True)
        out = [t for t in tree_leaves(case(x, w)) if isinstance(t, Tensor)]
        live = [t for t in out if t.requires_grad]
        grads = (
            torch.autograd.grad(live, [x, w], [torch.empty_like(t) for t in live], allow_unused=True) if live else ()
        )
        found = [x, *out, *(g for g in grads if g is not None)]
        keys = [storage_key(t) for t in found]
        return [(told(t), keys.index(key)) for t, key in zip(found, keys, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_it_says_what_pytorch_says_at_first_and_again(name: str) -> None:
    mode = CachingFakeMode(allow_non_fake_inputs=True)
    expected = run(FakeTensorMode(allow_non_fake_inputs=True), CASES[name])
    assert run(mode, CASES[name]) == expected
    assert run(mode, CASES[name]) == expected


def test_what_was_worked_out_once_is_not_worked_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    mode, worked = CachingFakeMode(allow_non_fake_inputs=True), []
    made = CachingFakeMode.run_uncached
    monkeypatch.setattr(
        CachingFakeMode, "run_uncached", lambda self, func, *rest: worked.append(func) or made(self, func, *rest)
    )
    for name in ("pointwise", "convolution", "norm in training"):
        run(mode, CASES[name])
    assert worked
    before = len(worked)
    for name in ("pointwise", "convolution", "norm in training"):
        run(mode, CASES[name])
    assert len(worked) == before


def test_what_is_remembered_has_a_bound_and_shares_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps at thousands of sizes remember as much as there is room for, and a tensor that many read once."""
    monkeypatch.setattr(lightning_plugin.fakes, "MAX_RESULTS", 50)
    mode = CachingFakeMode(allow_non_fake_inputs=True)
    with mode:
        for size in range(1, 60):
            x = torch.empty(size, 3)
            x.relu(), x.sigmoid(), x.tanh(), x.exp()
            parts = {id(key[2][0]) for key in mode.results if key[2] and key[2][0][0] == x.shape}
            assert len(parts) <= 1
            assert len(mode.results) <= 50 and len(mode.interned) <= 100


def test_errors_are_errors() -> None:
    with CachingFakeMode(allow_non_fake_inputs=False):
        x = torch.empty(2, 3)
        for wrong in (lambda: x.view(7), lambda: x + torch.empty(4), lambda: x.add_(torch.empty(5, 3))):
            with pytest.raises(RuntimeError):
                wrong()


def test_tensors_of_two_devices_are_kept_apart() -> None:
    with CachingFakeMode(allow_non_fake_inputs=True):
        here, there = torch.empty(2, 3), torch.empty(2, 3, device="cuda")
        for _ in range(2):
            assert (here + 1).device.type == "cpu" and (there + 1).device.type == "cuda"
            assert there.view(6).device.type == "cuda" and there.cpu().device.type == "cpu"
            with pytest.raises(RuntimeError):
                here + there


def test_what_is_known_of_a_tensor_is_not_forgotten() -> None:
    with CachingFakeMode(allow_non_fake_inputs=True):
        for number in (2.0, 3.0):
            assert isinstance(t := torch.tensor(number), FakeTensor)
            assert (t * 2).item() == 2 * number
