"""Stages in which instances are on their own are planned as one segment, however long they are."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from lightning_plugin import make_plan
from lightning_plugin.planner.costs.grids import image_counts


class Encoder(nn.Module):
    """Transformer blocks over each image of a bag, and the mean over the bag."""

    def __init__(self, blocks: int, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 8, 8)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.embed(x).flatten(2).transpose(1, 2)).mean((0, 1))  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [3, pytest.param(24, marks=pytest.mark.full)])
def test_what_is_held_does_not_grow_with_the_bag(blocks: int) -> None:
    peaks = []
    for count in (500, 4000):
        plan = make_plan(Encoder(blocks), (count, 3, 32, 32), budget="1MiB", disk=False)
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
