"""Stages in which instances are on their own are planned as one segment, however long they are."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from lightning_plugin import make_plan
from lightning_plugin.planner.analysis.recorded import recorded
from lightning_plugin.planner.costs.grids import image_counts
from lightning_plugin.planner.search.cuts import MANY, carried, few, stages_of


class Encoder(nn.Module):
    """Transformer blocks over each image of a bag, and the mean over the bag."""

    def __init__(self, blocks: int, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 8, 8)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.embed(x).flatten(2).transpose(1, 2)).mean((0, 1))  # type: ignore[no-any-return]


def test_images_are_carried_and_windows_carry_nothing_else() -> None:
    with recorded(Encoder(2), (40, 3, 32, 32), torch.float32) as (network, _):
        for begin, end in stages_of(network).values():
            assert 2 in carried(network.order[begin:end])
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1))
    with recorded(convolutions, (5, 3, 32, 32), torch.float32) as (network, _):
        assert carried(network.order) == {2}
    with recorded(convolutions, (1, 3, 32, 32), torch.float32) as (network, _):
        assert not carried(network.order)
    with recorded(nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.ReLU()), (1, 3, 32, 32), torch.float32) as (network, _):
        assert carried(network.order) == {0, 1}, "patches that do not overlap are on their own"


def test_what_is_held_does_not_grow_with_the_bag() -> None:
    peaks = []
    for count in (500, 4000):
        plan = make_plan(Encoder(6), (count, 3, 32, 32), budget="1MiB", disk=False)
        (segment,) = plan.segments
        assert segment.forward.counts[2] > 1 and segment.backward.counts[2] > 1 and not segment.forecast.stored_bytes
        peaks.append(plan.peak_bytes)
    assert max(peaks) <= 1.1 * min(peaks) and max(peaks) <= 2**20


def test_images_of_bags_are_cut_axis_by_axis() -> None:
    """Until each image of the first axis is alone, then along the next."""
    found = image_counts((3, 700))
    assert found[0] == (1, 1) and found[-1] == (3, 700)
    assert sorted(found) == found and all(a == 3 or b == 1 for a, b in found)
    assert (2, 1) in found and (3, 1) in found and (3, 2) in found
    assert image_counts(()) == [()] and image_counts((1,)) == [(1,)]


def test_cuts_inside_are_few_and_apart() -> None:
    sizes = [10] * 200
    assert few(range(MANY), sizes) == list(range(MANY))
    some = few(range(100), sizes)
    assert len(some) <= 8 and all(b - a > 5 for a, b in itertools.pairwise(some))
    assert few(range(100), [1 if i % 10 == 0 else 5 for i in range(200)]) == list(range(10, 100, 20))
