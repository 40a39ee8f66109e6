"""What a run does for one slide does not grow with the number of slides: counted in what is looked at and written."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from wsi_trainer.cli import main
from wsi_trainer.synthetic import SlideSpec, write_slide

FEW, MANY = 3, 9


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of few and of many slides of 64 px, each a link to the same ones."""
    root = tmp_path_factory.mktemp("slides")
    for count in (FEW, MANY):
        (root / str(count)).mkdir()
        for i in range(count):
            write_slide(root / str(count) / f"s{i}.tif", SlideSpec(64, 64, seed=i, tissue=0.3))
    return root


class Looks:
    """How often folders are listed, by their place in ``out``, and how many entries that gave."""

    def __init__(self, patch: pytest.MonkeyPatch, out: Path) -> None:
        self.listed: Counter[str] = Counter()
        self.entries = 0
        self.written: Counter[str] = Counter()
        for name in ("scandir", "listdir"):
            patch.setattr(os, name, self.counted(getattr(os, name), out))
        replace = os.replace

        def replaced(source: Any, target: Any, **more: Any) -> None:
            if os.path.isfile(source):
                self.written[Path(target).name] += os.path.getsize(source)
            replace(source, target, **more)

        patch.setattr(os, "replace", replaced)

    def counted(self, look: Any, out: Path) -> Any:
        def listing(path: Any = ".") -> Any:
            place = Path(os.fsdecode(path))
            if place in (out, out / ".staging", out / "thumbnails"):
                self.listed[str(place.relative_to(out))] += 1
                self.entries += len(before(place))
            return look(path)

        before = os.listdir
        return listing


def looks(slides: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> Looks:
    with monkeypatch.context() as patch:
        found = Looks(patch, out)
        assert main(["preprocess", str(slides), str(out), "--workers", "1", "--stall-minutes", "0"]) == 0
    return found


def test_folders_of_many_slides_are_not_listed_for_each_of_them(
    slides: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {}
    for count in (FEW, MANY):
        out = tmp_path / str(count)
        first = looks(slides / str(count), out, monkeypatch)
        again = looks(slides / str(count), out, monkeypatch)
        assert sum(path.suffix == ".zarr" for path in out.iterdir()) == count
        runs[count] = first, again
    for few, many in zip(runs[FEW], runs[MANY], strict=True):
        assert few.listed == many.listed  # a look for each slide would see all others
        assert many.entries <= few.entries * MANY / FEW
    for name in ("manifest.csv", "stores.csv", "tissue.html"):  # once a run, and not after each slide
        few, many = (runs[count][0].written[name] for count in (FEW, MANY))
        assert 0 < many <= few * MANY / FEW


def test_a_half_written_journal_goes_with_the_conversion(slides: Path, tmp_path: Path) -> None:
    """It has a name that is known, so that nobody looks for it."""
    out = tmp_path / "out"
    staging = out / ".staging"
    staging.mkdir(parents=True)
    (staging / "s0.journal.part").write_text("{")
    assert main(["preprocess", str(slides / str(FEW)), str(out), "--workers", "1", "--stall-minutes", "0"]) == 0
    assert all(path.suffix == ".lock" for path in staging.iterdir())
