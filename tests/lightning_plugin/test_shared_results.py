"""Results that share memory in plain PyTorch: what is written into one is in the other; and strides of results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_plugin import LazyImage, TiledModule
from lightning_plugin.capture.lazy import materialize_together
from lightning_plugin.errors import RecordingError
from tests.exactness import TOLERANCE, difference, flat
from tests.exactness import real as pairs_of

WAYS: dict[str, dict[str, Any]] = {"tiles": {"tiles": (2, 3)}, "kept": {"budget": "64MiB"}}
SHAPE = (2, 3, 12, 14)


class Returns(nn.Module):
    """Several results of one map and of the image."""

    def __init__(self, results: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.results = results

    def forward(self, x: Tensor) -> Any:
        return self.results(self.conv(x), x)


def complex_and_parts(y: Tensor, x: Tensor) -> list[Tensor]:
    z = torch.complex(y, y * 2)
    return [z, z.imag]


def written_before(y: Tensor, x: Tensor) -> list[Tensor]:
    part = y[:, :2]
    y.mul_(3)
    return [part, y]


SHARED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "flattened": lambda y, x: (y, y.flatten(1)),
    "some channels": lambda y, x: {"all": y, "some": y[:, :2]},
    "rows": lambda y, x: (y[:, :, 3:7], y),
    "permuted": lambda y, x: (y, y.permute(0, 2, 3, 1)),
    "detached": lambda y, x: (y, y.detach()),
    "itself": lambda y, x: (y, y.view_as(y), y),
    "two overlapping parts": lambda y, x: (y[:, :3], y[:, 1:]),
    "steps": lambda y, x: (y[:, :, ::2], y[:, :, ::3]),
    "windows": lambda y, x: (y, y.unfold(2, 4, 2)),
    "expanded": lambda y, x: (y, y[:, :1].expand_as(y), y[:, :1]),
    "diagonal": lambda y, x: (y, y.diagonal(dim1=2, dim2=3)),
    "parts of a diagonal": lambda y, x: (y.diagonal(dim1=2, dim2=3), y.diagonal(dim1=2, dim2=3)[:, 1]),
    "complex and a part": complex_and_parts,
    "written before": written_before,
    "the image and a part": lambda y, x: (x, x[:, :1], y),
    "a view of the image": lambda y, x: (x.flatten(2), y),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
@pytest.mark.parametrize("name", SHARED)
def test_a_write_into_one_result_is_in_the_others(name: str, first: bool, way: str) -> None:
    torch.manual_seed(0)
    net, x = Returns(SHARED[name]).double(), torch.randn(SHAPE, dtype=torch.float64)
    tiled, twin = copy.deepcopy(net), x.clone()
    expected, actual = net(x), TiledModule(tiled, **WAYS[way])(twin)
    outcomes = []
    for results, module, image in ((flat(expected), net, x), (flat(actual), tiled, twin)):
        written, used = (results[0], results[-1]) if first else (results[-1], results[0])
        written.mul_(2)
        if "image" not in name:  # which backward needs as it was
            sum((pairs_of(r).square().mean() for r in (used, written)), torch.zeros(())).backward()
        outcomes.append([*map(pairs_of, results), image, *(p.grad for p in module.parameters())])
    for a, e in zip(outcomes[1], outcomes[0], strict=True):
        assert (a is None) == (e is None)
        assert a is None or difference(a.detach(), e.detach()) < TOLERANCE


@pytest.mark.parametrize("name", SHARED)
def test_results_have_the_strides_and_the_versions_of_plain_pytorchs(name: str) -> None:
    net, x = Returns(SHARED[name]).double(), torch.randn(SHAPE, dtype=torch.float64)
    for a, e in zip(flat(TiledModule(net, tiles=2)(x)), flat(net(x)), strict=True):
        assert a.stride() == e.stride() and a.requires_grad == e.requires_grad


APART: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "halves": lambda y, x: y.chunk(2, 1),
    "crops": lambda y, x: (y[:, :, :3], y[:, :, -3:]),
    "parts": lambda y, x: (torch.complex(y, y).real, torch.complex(y, y).imag),
    "copies": lambda y, x: (y, y.clone(), y.flatten(1) + 0),
}


@pytest.mark.parametrize("name", APART)
def test_results_that_do_not_overlap_are_computed_one_by_one(name: str) -> None:
    """A crop does not hold the map that it is cut from."""
    net = Returns(APART[name])
    results = flat(TiledModule(net, tiles=2)(torch.randn(SHAPE)))
    assert len({r.untyped_storage().data_ptr() for r in results}) == len(results)
    assert all(r.untyped_storage().nbytes() == r.nbytes for r in results)


def test_lazy_results_that_are_computed_together_share_memory() -> None:
    y = nn.Conv2d(3, 4, 3)(LazyImage.from_tensor(torch.randn(SHAPE)))
    whole, part = materialize_together([y, y[:, 1]])
    with torch.no_grad():
        whole.zero_()
    assert not part.any()


def test_views_of_unknown_kind_are_refused() -> None:
    net = Returns(lambda y, x: (y, y.view(torch.int32)))
    with pytest.raises(RecordingError, match=r"share memory.*clone\(\)"):
        TiledModule(net, tiles=2)(torch.randn(SHAPE))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "results", [lambda y, x: y, lambda y, x: y.relu() + 1, lambda y, x: (x * 2).permute(0, 2, 3, 1)]
)
def test_results_of_channels_last_images_have_channels_last(results: Callable[..., Any], way: str) -> None:
    net = Returns(results).to(memory_format=torch.channels_last)
    x = torch.randn(SHAPE).to(memory_format=torch.channels_last)
    for image in (x, x[:1], x.requires_grad_()):
        expected, actual = net(image), TiledModule(net, **WAYS[way])(image)
        assert actual.stride() == expected.stride()
        torch.testing.assert_close(actual, expected)
