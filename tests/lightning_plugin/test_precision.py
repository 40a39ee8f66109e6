"""In float32 and under bfloat16 autocast, tiles are no further from float64 than plain PyTorch is, times two."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_plugin import LazyImage, materialize
from lightning_plugin.engine import Engine
from tests.exactness import TOLERANCE, difference, flat
from tests.lightning_plugin.cases import GRIDS, noting, still
from tests.zoo import ZOO, fill

QUICK = ("resnet18", "attention_cbam", "mil_gated_attention", "wave_classifier")
FULL = tuple(name for name, entry in ZOO.items() if not entry.stochastic)


def gradients(net: nn.Module, x: Tensor, engine: Engine | None, autocast: bool) -> Tensor:
    """Output and all gradients of one step, as one vector."""
    x = x.clone().requires_grad_()
    image = x if engine is None else LazyImage.from_tensor(x, engine=engine)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = net(image)
    generator = torch.Generator().manual_seed(5)
    loss = sum((o * torch.randn(o.shape, generator=generator, dtype=x.dtype)).sum() for o in flat(outputs))
    loss.backward()  # type: ignore[union-attr]
    found = [*(materialize(o) for o in flat(outputs)), x.grad, *(p.grad for p in net.parameters())]
    return torch.cat([t.detach().double().flatten() for t in found if t is not None])


def ratio(name: str, autocast: bool) -> float | None:
    """The tiled error over plain PyTorch's own, both in the L2 norm, both against plain PyTorch in float64; None
    where plain PyTorch's own is no number."""
    entry = ZOO[name]
    exact = still(fill(entry.build().double()))
    x = torch.randn(entry.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    single = copy.deepcopy(exact).float()
    reference = gradients(exact, x.float().double(), None, False)
    plain = gradients(copy.deepcopy(single), x.float(), None, autocast)
    if not plain.isfinite().all():
        return None
    tiled = gradients(copy.deepcopy(single), x.float(), noting(*GRIDS[0]), autocast)
    return ((tiled - reference).norm() / (plain - reference).norm()).item()


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16 autocast"])
def test_tiles_round_no_more_than_plain(
    autocast: bool, request: pytest.FixtureRequest, record_result: Callable[[str, dict[str, Any]], None]
) -> None:
    names = FULL if request.config.getoption("--full") else QUICK
    found = {name: ratio(name, autocast) for name in names}
    # oneDNN makes infinite gradients of weights of one network (5 x 5 x 5 in bfloat16) on some processors.
    without = [name for name, r in found.items() if r is None]
    assert len(without) <= 1, f"plain PyTorch makes no numbers: {without}"
    ratios = {name: r for name, r in found.items() if r is not None}
    kind = "bfloat16_autocast" if autocast else "float32"
    values = {
        "cases": len(ratios),
        "median ratio": statistics.median(ratios.values()),
        "ratios": ratios,
        "no numbers in PyTorch": without,
    }
    record_result(f"exactness_{kind}", values)
    over = {name: r for name, r in ratios.items() if not r <= 2}
    assert not over, f"further from float64 than twice plain PyTorch: {over}"


def test_there_are_forty_cases() -> None:
    assert len(FULL) >= 40


def order(tensor: torch.Tensor) -> list[int]:
    """The strides that mean something: a dimension of size one may have any."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


@pytest.mark.parametrize(
    "name", ["resnet18", pytest.param("shufflenet_v2", marks=pytest.mark.full), "unet_transposed", "unet3d_group"]
)
def test_channels_last_is_honoured(name: str) -> None:
    """The result has the memory format of plain PyTorch's, and so has the image's gradient."""
    entry = ZOO[name]
    last = torch.channels_last if len(entry.shape) == 4 else torch.channels_last_3d
    plain = still(fill(entry.build().double())).to(memory_format=last)  # type: ignore[call-overload]
    net = copy.deepcopy(plain)
    x = torch.randn(entry.shape, dtype=torch.float64).to(memory_format=last)
    twins = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = plain(twins[0])
    result = net(LazyImage.from_tensor(twins[1], engine=noting(*GRIDS[0])))
    actual = materialize(result)
    assert result.stride() == expected.stride()
    assert difference(actual.detach(), expected.detach()) < TOLERANCE
    expected.square().sum().backward()
    actual.square().sum().backward()
    for (n, a), (_, e) in zip(net.named_parameters(), plain.named_parameters(), strict=True):
        assert order(a.grad) == order(e.grad), n
    assert difference(twins[1].grad, twins[0].grad) < TOLERANCE
    assert order(twins[1].grad) == order(twins[0].grad)
