"""Slides of a patient as one bag: read as one, held one at a time, learnt and judged as one."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_plugin import Box
from wsi_trainer.data.dataset import DataConfig, Joined
from wsi_trainer.data.manifest import SlideRecord, by_patient
from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.slide.views import View


class Bag(View):
    """Numbers as a bag, or as features, that notes what it is asked."""

    def __init__(self, pixels: Tensor, instances: int | None = 1) -> None:
        self.pixels, self.instances, self.log = pixels, instances, list[str]()
        self.shape, self.dtype = tuple(pixels.shape), pixels.dtype
        super().__init__("bag")

    def load(self, box: Box) -> Tensor:
        self.log.append("load")
        rows, *space = (slice(lo, hi) for lo, hi in box.intervals())
        return self.pixels[rows, :, *space] if self.instances else self.pixels[:, :, rows, *space]

    def constant(self, box: Box) -> Tensor | None:
        found = self.load(box).transpose(0, 1).flatten(1)
        return found[:, 0] if found.numel() and bool((found == found[:, :1]).all()) else None

    def close(self) -> None:
        self.log.append("close")


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.booleans(), st.data())
def test_any_box_is_that_of_the_bags_put_together(lengths: list[int], images: bool, data: st.DataObject) -> None:
    draw = torch.Generator().manual_seed(sum(lengths))
    shapes = [(n, 3, 4, 4) if images else (1, 6, n, 1) for n in lengths]
    parts = [Bag(torch.randint(0, 2, s, generator=draw, dtype=torch.uint8), 1 if images else None) for s in shapes]
    whole = Bag(torch.cat([p.pixels for p in parts], dim=0 if images else 2), 1 if images else None)
    joined = pickle.loads(pickle.dumps(Joined(parts)))
    assert joined.shape == whole.shape and joined.instances == whole.instances
    extent = (sum(lengths), 4, 4) if images else (sum(lengths), 1)
    ends = [sorted(data.draw(st.tuples(st.integers(0, e), st.integers(0, e)))) for e in extent]
    box = Box.of((lo, hi) for lo, hi in ends)
    assert torch.equal(joined.read(box), whole.read(box))
    constant, expected = joined.constant(box), whole.constant(box)
    assert (constant is None) == (expected is None) and (constant is None or torch.equal(constant, expected))


def test_one_slide_is_held_at_a_time() -> None:
    parts = [Bag(torch.zeros(3, 3, 2, 2)), Bag(torch.ones(2, 3, 2, 2))]
    joined = Joined(parts)
    joined.read(Box((0, 0, 0), (2, 2, 2)))
    joined.prefetch([Box((2, 0, 0), (4, 2, 2))])
    joined.read(Box((2, 0, 0), (4, 2, 2)))
    assert parts[0].log == ["load", "load", "close"]
    assert parts[1].log == ["load"]
    joined.read(Box((0, 0, 0), (1, 2, 2)))
    assert parts[1].log[-1] == "close"
    with pytest.raises(SlideError, match="leaves the 5 positions of 2 joined sources"):
        joined.read(Box((4, 0, 0), (6, 2, 2)))
    with pytest.raises(ValueError, match="cannot be joined"):
        Joined([Bag(torch.zeros(1, 3, 2, 2)), Bag(torch.zeros(1, 3, 4, 4))])


def record(slide: str, patient: str, label: str = "1", site: str = "A", split: str = "train") -> SlideRecord:
    return SlideRecord(slide, Path(slide), label, patient, split, site)


def test_slides_of_a_patient_have_to_agree() -> None:
    slides = [record("a", "p"), record("b", "q", label="0"), record("c", "p")]
    patients = by_patient(slides, ("label",))
    assert [(p.slide, [part.slide for part in p.parts]) for p in patients] == [("p", ["a", "c"]), ("q", ["b"])]
    with pytest.raises(UserError, match="patient p has '1' as label of slide a and '0' of d;"):
        by_patient([*slides, record("d", "p", label="0")], ("label",))
    assert len(by_patient([*slides, record("d", "p", label="0")])) == 2, "without a task labels are not looked at"
    with pytest.raises(UserError, match="as site of slide a"):
        by_patient([*slides, record("d", "p", site="B")], ("label",))
    with pytest.raises(UserError, match=r"data\.group is patient, which joins bags"):
        DataConfig(manifest=Path("m.csv"), group="patient")
