"""Convolutions whose result nobody reads: their gradients to the bit, how often they run, and what is planned."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_plugin import LazyImage, TiledModule
from lightning_plugin.private import FakeTensor, TorchDispatchMode
from lightning_plugin.rules.unread import ConvolutionArguments, unread
from tests.lightning_plugin.outside import account
from tests.lightning_plugin.test_random_networks import QUIET
from tests.warm import start

aten = torch.ops.aten


@st.composite
def convolutions(draw: Any) -> tuple[list[Tensor], ConvolutionArguments]:
    """The tensors of a convolution, and how it is called."""
    count, groups, transposed = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.booleans())
    few = [tuple(draw(st.integers(low, 2)) for _ in range(count)) for low in (1, 0, 1)]
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    x = torch.randn(2, 4, *(draw(st.integers(7, 10)) for _ in range(count)), dtype=dtype)
    if count > 1 and draw(st.booleans()):
        x = x.contiguous(memory_format=torch.channels_last if count == 2 else torch.channels_last_3d)
    kernel = [draw(st.integers(1, 3)) for _ in range(count)]
    lead = (4, 6 // groups) if transposed else (6, 4 // groups)
    tensors = [x, torch.randn(*lead, *kernel, dtype=dtype)]
    if draw(st.booleans()):
        tensors.append(torch.randn(6, dtype=dtype))
    wanted = draw(st.lists(st.booleans(), min_size=len(tensors), max_size=len(tensors)).filter(any))
    for t, needs in zip(tensors, wanted, strict=True):
        t.requires_grad_(needs)
    return tensors, ConvolutionArguments(*few, transposed, groups)


@settings(max_examples=60, **QUIET)
@given(convolutions())
def test_the_gradients_are_those_of_autograd_to_the_bit(case: tuple[list[Tensor], ConvolutionArguments]) -> None:
    tensors, how = case
    bias = tensors[2] if len(tensors) > 2 else None
    more = [0] * len(how.stride)
    plain = aten.convolution(
        *tensors[:2], bias, how.stride, how.padding, how.dilation, how.transposed, more, how.groups
    )  # fmt: skip
    ours = unread(tensors[0], tensors[1], bias, how)
    assert (ours.shape, ours.dtype) == (plain.shape, plain.dtype)
    assert ours.untyped_storage().nbytes() <= 8
    cotangent, leaves = torch.randn_like(plain), [t for t in tensors if t.requires_grad]
    for a, b in zip(*(torch.autograd.grad(y, leaves, cotangent) for y in (plain, ours)), strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()


class Counting(TorchDispatchMode):
    """Counts calls of operators on tensors with data."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls[func] += not any(isinstance(a, FakeTensor) for a in args)
        return func(*args, **(kwargs or {}))


def convolutions_of(net: nn.Module, image: Tensor, **options: Any) -> tuple[int, int]:
    """Number of convolutions that a step computes forward, and on the way back."""
    tiled = TiledModule(net, **options)
    with Counting() as counting:
        out = tiled(image)
        forward = counting.calls[aten.convolution.default]
        out.backward(torch.ones_like(out))
    return forward, counting.calls[aten.convolution.default] - forward


def pair(**how: Any) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, **how), nn.ReLU(), nn.Conv2d(8, 8, 3, **how))


@pytest.mark.parametrize("how", [{"padding": 1}, {"padding": 2, "stride": 2}, {"dilation": 2}], ids=str)
def test_what_is_stored_and_not_read_is_not_computed_in_backward(how: dict[str, int]) -> None:
    """Of two convolutions that tiles compute, the first; and in a scan."""
    x = torch.randn(1, 3, 40, 40)
    assert convolutions_of(pair(**how), x, tiles=(2, 2)) == (8, 4)
    assert convolutions_of(pair(**how), x, tiles=(4, 1), halo="share") == (8, 4)


def test_transposed_convolutions_too() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2, 2))
    assert convolutions_of(net, torch.randn(1, 3, 40, 40), tiles=(2, 2)) == (8, 4)
    padded = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2, 2, output_padding=1))
    forward, back = convolutions_of(padded, torch.randn(1, 3, 40, 40), tiles=(2, 2))
    assert forward == 8 and 4 <= back < 8


class Read(nn.Module):
    """A convolution whose result is stored, and read on the way there as well."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.conv(x)
        return made, made.square().mean()


def test_what_is_read_is_computed() -> None:
    net, x = Read().double(), torch.randn(1, 3, 40, 40, dtype=torch.float64)
    found = []
    for module in (net, TiledModule(net, tiles=(2, 2))):
        net.zero_grad()
        made, mean = module(x if module is net else LazyImage(x))
        (made.square().sum() + mean).backward()
        found.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= 1e-9 * a.abs().max()


def test_a_plan_knows_what_is_not_made() -> None:
    """A convolution to many channels, whose results would be the most that a tile has."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 64, 3, padding=1))
    x = torch.randn(1, 3, 128, 128)
    tiled = TiledModule(net, budget="14MiB")

    def step() -> None:
        out = tiled(x)
        out.backward(torch.ones_like(out))

    books = account(step, net)
    assert tiled.plan is not None and len(tiled.plan.segments) == 1
    assert books.held <= tiled.plan.peak_bytes == tiled.peak_bytes


@pytest.mark.parametrize("way", [{"tiles": (2, 2)}, {"budget": "1GiB"}], ids=str)
def test_strided_convolutions_of_few_channels_have_gradients_in_channels_last_order(
    way: dict[str, Any], tmp_path: Path
) -> None:
    """PyTorch's own kernel ends the process there, so it is asked in another one."""
    process = start(tmp_path / "log.txt", strided, way, tmp_path / "found.pt")
    process.join(120)
    process.kill()
    assert process.exitcode == 0, (tmp_path / "log.txt").read_text()
    for found, expected in torch.load(tmp_path / "found.pt"):
        torch.testing.assert_close(found, expected)


def strided(way: dict[str, Any], path: Path) -> None:
    torch.manual_seed(0)
    found = []
    for height, width in [(128, 93), (107, 84), (106, 80), (98, 80), (116, 86)] * 4:
        pixels = torch.rand(1, height, width, 3).permute(0, 3, 1, 2)
        # The first convolution hands its order on, and its result needs a gradient.
        nets = [nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 1, stride=2, bias=False))]
        nets.append(copy.deepcopy(nets[0]))
        TiledModule(nets[0], **way)(LazyImage.from_tensor(pixels)).square().mean().backward()
        nets[1](pixels.contiguous()).square().mean().backward()
        found += [(a.grad, b.grad) for a, b in zip(nets[0].parameters(), nets[1].parameters())]
    torch.save(found, path)
