"""Picking positions by rank or by index, products and truth of all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_plugin import LazyImage, materialize
from tests.exactness import asked, assert_exact
from tests.lightning_plugin.rules.helpers import After, assert_tiled, recorded_kinds
from tests.sampling import sampled

GRIDS = [((3, 2), (2, 3)), ((1, 1), (4, 3)), ((5, 7), (1, 2))]


def bag(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


INDEXED = {
    "topk": lambda x: x.flatten(2).topk(3, dim=2)[0].mean(2),
    "smallest": lambda x: x.flatten(2).topk(2, dim=2, largest=False)[0],
    "topk of all": lambda x: x.flatten(1).topk(5)[0],
    "features of the best": lambda x: best_features(x, 3),
    "index_select": lambda x: x[0].flatten(1).t().index_select(0, x[0, 0].flatten().topk(3)[1]),
    "indexing": lambda x: x.flatten(2)[:, :, torch.tensor([[0, 3], [-1, 5]])],
    "at argmax": lambda x: x.flatten(2).gather(2, x.flatten(2).argmax(2, keepdim=True)),
    "at argmin of all": lambda x: x.flatten().index_select(0, x.argmin().view(1)),
}


def best_features(x: Tensor, k: int) -> Tensor:
    h = bag(x)
    where = h[..., 0].topk(k, dim=1)[1]
    return torch.gather(h, 1, where.unsqueeze(-1).expand(-1, -1, h.shape[-1]))


@pytest.mark.parametrize("name", INDEXED)
@pytest.mark.parametrize("grids", GRIDS)
def test_picked_positions(name, grids):
    joins = name not in ("index_select", "at argmin of all")  # each image has its own order, where places are picked
    assert_tiled(After(INDEXED[name]), (2, 3, 11, 7), joins=joins, tiles=grids[0], backward_tiles=grids[1])


@pytest.mark.parametrize("tiles", [(1, 1), (3, 2), (5, 7)])
def test_indices_are_those_of_the_whole_map(tiles):
    x = torch.randn(2, 3, 11, 7).relu()
    lazy = LazyImage.from_tensor(x, engine=asked(tiles, tiles))
    assert torch.equal(materialize(lazy.argmax()), x.argmax())
    assert torch.equal(materialize((-lazy).flatten(1).argmin(1)), (-x).flatten(1).argmin(1))
    values, where = lazy.flatten(2).topk(4, dim=2)
    assert torch.equal(materialize(values), x.flatten(2).topk(4, dim=2)[0])
    assert torch.equal(x.flatten(2).gather(2, materialize(where)), materialize(values))


@pytest.mark.parametrize("sign", [1, -1])
def test_the_first_of_several_nan_is_found_whatever_tile_it_is_in(sign):
    x = torch.randn(1, 1, 6, 8) * sign
    x[0, 0, 1, 6] = x[0, 0, 2, 0] = torch.nan  # the later one lies in the tile that is computed first
    lazy = LazyImage.from_tensor(x, engine=asked((2, 2), (2, 2)))
    for seek in (torch.argmax, torch.argmin):
        assert int(materialize(seek(lazy))) == int(seek(x)) == 14
    assert int(materialize(lazy.flatten(1).max(1)[1])) == 14


@pytest.mark.parametrize("dim", [2, 3])
def test_values_and_places_of_rows_and_columns_are_tiled(dim):
    assert_tiled(After(lambda x: x.max(dim)[0] + x.min(dim, keepdim=True)[0].squeeze(dim)), (2, 3, 11, 7))
    assert_tiled(After(lambda x: x.prod(dim)), (2, 3, 11, 7))
    x = torch.randint(0, 4, (2, 3, 11, 7)).double()
    lazy = LazyImage.from_tensor(x, engine=asked((3, 2), (3, 2)))
    assert torch.equal(materialize(lazy.argmax(dim)), x.argmax(dim))
    assert torch.equal(materialize(lazy.max(dim)[1]), x.max(dim)[1])


def test_equal_values_are_ranked_by_position():
    lazy = LazyImage.from_tensor(torch.zeros(1, 1, 5, 6), engine=asked((3, 2), (3, 2)))
    assert materialize(lazy.flatten(2).topk(7)[1]).flatten().tolist() == list(range(7))


def test_an_index_out_of_range_is_refused():
    lazy = LazyImage.from_tensor(torch.zeros(1, 2, 5, 6))
    with pytest.raises(IndexError, match="30 positions is out of range"):
        materialize(lazy.flatten(2).index_select(2, torch.tensor([30])))


@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_the_product_of_all_is_a_barrier_and_exact(zeros):
    def holes(x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[2:])
        mask.view(-1)[[3, 20][:zeros]] = 0
        return ((x * 0.1 + 1) * mask).flatten(2).prod(2)

    assert_exact(After(holes), (1, 3, 5, 7))
    assert recorded_kinds(After(holes).double(), (1, 3, 5, 7))["Barrier"] == 1


def test_truth_of_all():
    x = torch.zeros(2, 3, 7, 5)
    x[1, 2, 6, 4] = 1
    lazy = LazyImage.from_tensor(x, engine=asked((3, 2), (3, 2)))
    assert materialize((lazy > 0).any()).item() and not materialize((lazy > 1).any()).item()
    assert not (lazy == 0).all() and (lazy >= 0).all()
    assert torch.equal(materialize((lazy > 0).flatten(2).any(2)), (x > 0).flatten(2).any(2))
    assert torch.count_nonzero(lazy).item() == 1


QUANTILES = {
    "of space": lambda x: x.flatten(2).quantile(0.9, dim=-1),
    "several": lambda x: x.flatten(2).quantile(torch.tensor([0.1, 0.9], dtype=x.dtype), dim=-1),
    "kept": lambda x: x.flatten(2).quantile(0.5, dim=-1, keepdim=True),
    "of rows": lambda x: x.quantile(0.3, dim=3),
    "of channels": lambda x: x.quantile(0.5, dim=1),
    "of an image": lambda x: x.flatten(1).quantile(0.75, 1, interpolation="nearest"),
    "of all": lambda x: torch.nanquantile(x, 0.2),
}


@pytest.mark.parametrize(("name", "how"), sampled(QUANTILES, [{"tiles": (2, 3)}, {"budget": "1MiB"}], every=2))
def test_quantiles(name, how):
    assert_exact(After(QUANTILES[name]), (2, 3, 16, 14), engine=asked(**how))
