"""What is read ahead is what would have been read, where and when it would have been."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_plugin import Box, LazyImage
from wsi_trainer.data.datamodule import EpochSampler, TrainLoader
from wsi_trainer.data.dataset import Visit
from wsi_trainer.errors import SlideError
from wsi_trainer.models import SlideBatch
from wsi_trainer.slide.views import View

A, B = Box((0, 0), (8, 8)), Box((8, 0), (16, 8))


class Noise(View):
    """An image that notes which thread reads what, waits for a gate, and fails where it is told to."""

    dtype = torch.uint8

    def __init__(self, seed: int = 0, shape: tuple[int, ...] = (1, 3, 16, 16), broken: Box | None = None) -> None:
        self.shape = shape
        self.pixels = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, np.uint8))
        self.broken = broken
        self.reads: list[tuple[Box, str]] = []
        self.gate = threading.Event()
        self.gate.set()
        super().__init__(f"slide {seed}")

    def load(self, box: Box) -> Tensor:
        self.reads.append((box, threading.current_thread().name))
        assert self.gate.wait(20)
        if box == self.broken:
            raise SlideError("slide 7", f"cannot be read at {box}")
        return self.pixels[:, :, box.lo[0] : box.hi[0], box.lo[1] : box.hi[1]]

    def __reduce__(self) -> tuple[Any, ...]:
        return Noise, (0, self.shape)

    @property
    def boxes(self) -> list[Box]:
        return [box for box, _ in self.reads]


def test_what_was_announced_is_read_once_and_elsewhere() -> None:
    source = image = Noise()
    image.gate.clear()
    source.prefetch([B])  # does not wait
    image.gate.set()
    assert torch.equal(source.read(A), image.pixels[:, :, :8, :8])
    assert torch.equal(source.read(B), image.pixels[:, :, 8:, :8])
    assert sorted(image.boxes, key=str) == [A, B]
    assert dict(image.reads)[B].startswith("ahead") and not dict(image.reads)[A].startswith("ahead")
    assert torch.equal(source.read(B), image.pixels[:, :, 8:, :8])  # a second time, and it is read again
    assert len(image.reads) == 3


def test_an_error_is_raised_where_the_box_is_asked_for() -> None:
    source = Noise(broken=B)
    source.prefetch([B])
    source.read(A)
    with pytest.raises(SlideError, match="slide 7"):
        source.read(B)
    with pytest.raises(SlideError, match="slide 7"):
        source.read(B)  # and every time
    never_asked = Noise(broken=B)
    never_asked.prefetch([B])
    assert torch.equal(never_asked.read(A), Noise().pixels[:, :, :8, :8])


class Slides(Dataset[SlideBatch]):
    """Slides by number; one of them cannot be opened."""

    def __init__(self, count: int, lazy: bool = True, broken: int | None = None) -> None:
        self.count, self.lazy, self.broken = count, lazy, broken
        self.opened: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, visit: Visit) -> SlideBatch:
        if visit.slide == self.broken:
            raise KeyError(f"slide {visit.slide}")
        self.opened.append(tuple(visit))
        image = LazyImage(Noise(visit.slide)) if self.lazy else Noise(visit.slide).pixels
        return SlideBatch(image=image, targets={"label": torch.tensor([0])}, slide=str(visit.slide))


def loader(slides: Slides, ahead: bool) -> TrainLoader:
    return TrainLoader(slides, EpochSampler(len(slides), seed=3), workers=0, ahead=ahead)


def images_of(batch: SlideBatch) -> Noise:
    assert isinstance(batch["image"], LazyImage) and isinstance(batch["image"].source, Noise)
    return batch["image"].source


def epoch(given: TrainLoader, steps: int = 99) -> Iterator[tuple[str, Tensor]]:
    """The slides of an epoch with what their steps read."""
    for number, batch in enumerate(given, start=1):
        pixels = images_of(batch).read(A)
        yield batch["slide"], pixels
        if number == steps:
            return


def test_order_pixels_and_place_do_not_depend_on_it() -> None:
    with_it, without = loader(Slides(7), True), loader(Slides(7), False)
    for _ in range(3):
        for (name, pixels), (other, expected) in zip(epoch(with_it), epoch(without), strict=True):
            assert name == other and torch.equal(pixels, expected)
            assert with_it.state_dict() == without.state_dict()
    assert isinstance(with_it.dataset, Slides) and isinstance(without.dataset, Slides)
    assert with_it.dataset.opened == without.dataset.opened


def test_a_run_that_ends_between_goes_on_with_the_slide_that_was_open() -> None:
    first = loader(Slides(6), True)
    seen = [name for name, _ in epoch(first, steps=2)]
    second = loader(Slides(6), True)
    second.load_state_dict(first.state_dict())
    seen += [name for name, _ in epoch(second)]
    assert seen == [name for name, _ in epoch(loader(Slides(6), False))]


def test_what_cannot_be_opened_says_so_in_its_turn() -> None:
    order = [name for name, _ in epoch(loader(Slides(5), False))]
    broken = loader(Slides(5, broken=int(order[2])), True)
    steps = epoch(broken)
    assert [next(steps)[0], next(steps)[0]] == order[:2]
    with pytest.raises(KeyError, match=f"slide {order[2]}"):
        next(steps)
