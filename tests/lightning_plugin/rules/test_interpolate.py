"""Interpolation against plain PyTorch: every mode, by size and by factor, up and down, on several tile grids."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor

from lightning_plugin import LazyImage, materialize
from lightning_plugin.rules.adaptive import Bins
from lightning_plugin.rules.sampling import Antialiased, Cubic, Linear, Nearest, Rounding, Sampler
from tests.exactness import asked, assert_exact
from tests.lightning_plugin.rules.helpers import After, assert_tiled, recorded_kinds
from tests.sampling import sampled

MODES_2D = [
    ("nearest", None), ("nearest-exact", None), ("bilinear", False), ("bilinear", True), ("bicubic", False),
    ("bicubic", True), ("area", None),
]  # fmt: skip
TARGETS: list[dict[str, Any]] = [
    {"scale_factor": 2}, {"scale_factor": 3}, {"scale_factor": 0.5}, {"scale_factor": (1.5, 4)}, {"scale_factor": 2.3},
    {"scale_factor": 2.3, "recompute_scale_factor": True}, {"scale_factor": (0.4, 1.04)}, {"size": (23, 7)},
    {"size": (5, 31)}, {"size": (1, 26)}, {"size": (11, 13)}, {"size": (1, 1)},
]  # fmt: skip


def interpolate(x: Tensor, mode: str, align: bool | None, target: dict[str, Any]) -> Tensor:
    return F.interpolate(x, mode=mode, align_corners=align, **target)


@pytest.mark.parametrize(("way", "target"), sampled(MODES_2D, TARGETS, every=6))
def test_2d(way: tuple[str, bool | None], target: dict[str, Any]) -> None:
    mode, align = way
    net = After(partial(interpolate, mode=mode, align=align, target=target))
    assert_tiled(net, (2, 3, 11, 13), tiles=(3, 2), backward_tiles=(5, 7))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("target", [{"scale_factor": 0.3}, {"size": (4, 31)}, {"size": (1, 5)}], ids=str)
def test_antialias(mode: str, align: bool, target: dict[str, Any]) -> None:
    net = After(partial(F.interpolate, mode=mode, align_corners=align, antialias=True, **target))
    assert_tiled(net, (1, 3, 17, 13))


@pytest.mark.parametrize(
    "axes,mode,align",
    [
        (1, "linear", False), (1, "linear", True), (3, "trilinear", False), (3, "trilinear", True),
        (1, "nearest", None), (3, "nearest", None), (3, "nearest-exact", None), (1, "area", None), (3, "area", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("target", [{"scale_factor": 2}, {"scale_factor": 0.7}, {"size": 5}], ids=str)
def test_1d_and_3d(axes: int, mode: str, align: bool | None, target: dict[str, Any]) -> None:
    net = After(partial(interpolate, mode=mode, align=align, target=target), axes=axes)
    assert_tiled(net, (2, 3, 9, 7, 8)[: 2 + axes], tiles=(3, 2, 2)[:axes], backward_tiles=(2, 3, 1)[:axes])


def test_same_size_with_a_factor() -> None:
    """PyTorch's cubic interpolation copies in backward, but not in forward, if no size changes: left to PyTorch."""
    net = After(partial(F.interpolate, scale_factor=1.04, mode="bicubic"))
    assert_exact(net, (1, 3, 11, 13))
    assert recorded_kinds(net, (1, 3, 11, 13))["Barrier"] == 1


@pytest.mark.parametrize(
    "kind,how",
    [
        ("Periodic", {"scale_factor": 2}), ("Periodic", {"scale_factor": 2, "mode": "bilinear"}),
        ("Periodic", {"scale_factor": 0.5, "mode": "bicubic"}), ("Resample", {"scale_factor": 1.7}),
        ("Resample", {"scale_factor": 2, "mode": "bilinear", "align_corners": True}),
    ],
)  # fmt: skip
def test_kinds(kind: str, how: dict[str, Any]) -> None:
    """PyTorch's own kernel runs where positions repeat after a few."""
    assert recorded_kinds(After(partial(F.interpolate, **how)).double(), (1, 3, 12, 10))[kind] == 1


@pytest.mark.parametrize("factor", [2.0, 3.0, 41.0, 0.37, 1.04, 1.7])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width,channels,last", [(3, 1, False), (70, 4, False), (70, 4, True)])
def test_nearest_is_pytorchs(
    factor: float, mode: str, dtype: torch.dtype, width: int, channels: int, last: bool
) -> None:
    """The nearest neighbour depends on how PyTorch's arithmetic rounds, which depends on all of these."""
    x = torch.arange(channels * 97 * width, dtype=dtype).view(1, channels, 97, width)
    x = x.to(memory_format=torch.channels_last) if last else x
    lazy = LazyImage.from_tensor(x, engine=asked((4, 3)))
    how: dict[str, Any] = {"scale_factor": (factor, 1.0), "mode": mode}
    view = {"memory_format": torch.channels_last if last else torch.contiguous_format}
    tiled = materialize(F.interpolate(lazy.contiguous(**view), **how))
    assert torch.equal(tiled, F.interpolate(x, **how))


def test_integers() -> None:
    x = torch.randint(0, 255, (1, 3, 9, 11), dtype=torch.uint8)
    tiled = F.interpolate(LazyImage.from_tensor(x, engine=asked((2, 3))), scale_factor=2.5)
    assert torch.equal(materialize(tiled), F.interpolate(x, scale_factor=2.5))


def samplers(size: int, out: int) -> list[Sampler]:
    return [
        Linear(size, out), Linear(size, out, None, True), Linear(size, out, out / size), Cubic(size, out),
        Cubic(size, out, None, True), Antialiased(size, out), Antialiased(size, out, None, True, 2), Bins(size, out),
        Nearest(size, out, None, "nearest", Rounding.SINGLE),
        Nearest(size, out, None, "nearest-exact", Rounding.DIRECT),
    ]  # fmt: skip


@given(st.integers(1, 3000), st.integers(1, 3000), st.data())
def test_reach_is_what_taps_read(size: int, out: int, data: st.DataObject) -> None:
    lo = data.draw(st.integers(0, out - 1))
    hi = data.draw(st.integers(lo + 1, min(out, lo + 50)))
    for sampler in samplers(size, out):
        index, weight = sampler.taps(lo, hi)
        first, end = sampler.need(lo, hi)
        assert first >= 0 and end <= size
        assert int(index.min()) >= first and int(index.max()) < end
        torch.testing.assert_close(weight.sum(1), torch.ones_like(weight[:, 0]))


@given(
    size=st.tuples(st.integers(1, 12), st.integers(1, 12)), out=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    mode=st.sampled_from(MODES_2D), tiles=st.tuples(st.integers(1, 6), st.integers(1, 6)),
)  # fmt: skip
def test_any_size(size: Any, out: Any, mode: Any, tiles: Any) -> None:
    net = After(partial(interpolate, mode=mode[0], align=mode[1], target={"size": out}))
    assert_tiled(net, (1, 3, *size), tiles=tiles, backward_tiles=tiles[::-1])


@example(size=(1, 2), tiles=(1, 3), factor=(1.0, 3.0), mode=("nearest", None))
@given(
    size=st.tuples(st.integers(1, 12), st.integers(1, 12)), tiles=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    factor=st.tuples(*[st.sampled_from([0.5, 2 / 3, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 0.9, 1.3])] * 2),
    mode=st.sampled_from([m for m in MODES_2D if m[0] != "area"]),
)  # fmt: skip
def test_any_factor(size: Any, tiles: Any, factor: Any, mode: Any) -> None:
    out = tuple(int(n * f) for n, f in zip(size, factor, strict=True))
    assume(all(out) and (mode[0] != "bicubic" or size != out))
    net = After(partial(interpolate, mode=mode[0], align=mode[1], target={"scale_factor": factor}))
    assert_tiled(net, (1, 3, *size), tiles=tiles, backward_tiles=tiles[::-1])
