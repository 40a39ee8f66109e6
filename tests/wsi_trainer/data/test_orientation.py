"""A turned source shows what turning the dense image shows, box by box."""

import pytest
import torch

from lightning_plugin import Box, TensorSource
from wsi_trainer.data.images import dense
from wsi_trainer.data.orientation import ORIENTATIONS, Oriented


class HalfConstant(TensorSource):
    """Knows that its upper half is 7."""

    def constant(self, box: Box) -> torch.Tensor | None:
        return torch.full((3,), 7, dtype=torch.uint8) if box.hi[0] <= self.shape[2] // 2 else None


@pytest.fixture
def source() -> HalfConstant:
    pixels = torch.randint(
        0, 256, (1, 3, 8, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    pixels[:, :, :4] = 7
    return HalfConstant(pixels)


@pytest.mark.parametrize("orientation", range(ORIENTATIONS))
def test_every_box_is_a_part_of_the_turned_image(source: HalfConstant, orientation: int) -> None:
    turned = Oriented(source, orientation)
    whole = dense(turned)
    assert tuple(whole.shape) == turned.shape and whole.dtype == turned.dtype
    for lo in [(0, 0), (1, 2), (3, 0)]:
        for hi in [(4, 3), (5, 5), tuple(turned.shape[2:])]:
            box = Box(lo, hi)
            assert torch.equal(turned.read(box), whole[:, :, lo[0] : hi[0], lo[1] : hi[1]])
            value = turned.constant(box)
            if value is not None:
                assert (turned.read(box) == value.view(1, 3, 1, 1)).all()


def test_the_eight_orientations_differ_and_hold_the_same_pixels(source: HalfConstant) -> None:
    images = [dense(Oriented(source, orientation)) for orientation in range(ORIENTATIONS)]
    assert len({(tuple(image.shape), image.numpy().tobytes()) for image in images}) == ORIENTATIONS
    counts = [torch.bincount(image.flatten().long(), minlength=256) for image in images]
    assert all(torch.equal(count, counts[0]) for count in counts)


def test_something_of_each_orientation_is_known_constant(source: HalfConstant) -> None:
    for orientation in range(ORIENTATIONS):
        turned = Oriented(source, orientation)
        height, width = turned.shape[2:]
        corners = [Box((y, x), (y + 1, x + 1)) for y in (0, height - 1) for x in (0, width - 1)]
        assert sum(turned.constant(corner) is not None for corner in corners) == 2


def test_refuses_what_it_cannot_turn(source: HalfConstant) -> None:
    with pytest.raises(ValueError, match="orientation is 8"):
        Oriented(source, 8)
    with pytest.raises(ValueError, match="only flat slides"):
        Oriented(TensorSource(torch.zeros(1, 3, 4, 4, 4)), 1)
