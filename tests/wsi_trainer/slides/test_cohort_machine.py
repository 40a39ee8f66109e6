"""Whatever people and accidents do to a folder of stores: stores, manifest.csv and summary.csv agree after each run.

A machine of hypothesis goes through runs over different slides, other settings, overwriting, copies, `verify`, edits of
the manifest, processes that die at any rename, and damage. What it expects it keeps in a model of its own.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import numpy as np
import pytest
import tifffile
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from wsi_trainer.cli import main
from wsi_trainer.slides.export import is_current
from wsi_trainer.slides.store.manifest import find_damage, read_manifest

NAMES = ("a", "b", "c")
SIDE = 64


class _Killed(BaseException):
    pass


def _slide(path: Path, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    tifffile.imwrite(path, pixels, photometric="rgb", resolution=(20000, 20000), resolutionunit="CENTIMETER")


def _rows(path: Path) -> dict[str, dict[str, str]]:
    with path.open(newline="") as file:
        return {row[next(iter(row))].removesuffix(".zarr"): row for row in csv.DictReader(file)}


class Cohort(RuleBasedStateMachine):
    """A folder of slides and the folder of their stores."""

    sequences = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).sequences += 1
        self.root = Path(tempfile.mkdtemp())
        self.slides, self.out = self.root / "slides", self.root / "out"
        self.slides.mkdir()
        for seed, name in enumerate(NAMES):
            _slide(self.slides / f"{name}.tif", seed)
        self.mpp: dict[str, float] = {}  # of the stores that are there, whole or not
        self.labels: dict[str, str] = {}  # cells that the user wrote
        self.damaged: set[str] = set()
        self.listed: set[str] = set()  # rows that manifest.csv has to have
        self.uncertain = False  # a run died: the tables may lag behind, but what they say is still true

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    def run(self, names: list[str], mpp: float, overwrite: bool, export: bool = False, die: int | None = None) -> None:
        """A run over some slides; with `die` the process ends at that rename."""
        table = self.root / "list.csv"
        table.write_text("slide,site\n" + "".join(f"slides/{name}.tif,{name.upper()}\n" for name in names))
        words = ["preprocess", str(table), str(self.out), "--tissue", "none", "--workers", "1", "--stall_minutes", "0"]
        words += ["--mpp", str(mpp)] if mpp != 0.5 else []
        words += ["--overwrite", "true"] if overwrite else []
        words += ["--export_ngff", "0.4"] if export else []
        if die is not None:
            self._dying(words, names, mpp, overwrite, die)
            return
        able = [n for n in names if n not in self.mpp or overwrite or (self.mpp[n] == mpp and n not in self.damaged)]
        wrong = set(names) - set(able)
        # Damage of pixels is not looked for by a run that has nothing to do; damage of the manifest is.
        code = main(words)
        assert code == (1 if wrong else 0), (names, mpp, overwrite, self.mpp, self.damaged)
        for name in able:
            if self.mpp.get(name) != mpp or name in self.damaged:
                self.damaged.discard(name)
            self.mpp[name] = mpp
        self.uncertain = False
        self.listed |= set(self.mpp) - self.damaged
        failed = {Path(row["slide"]).stem for row in _rows(self.out / "failures.csv").values()}
        assert failed == wrong
        if export:
            for name in able:
                assert (self.out / "ngff-0.4" / f"{name}.zarr").is_dir()

    def _dying(self, words: list[str], names: list[str], mpp: float, overwrite: bool, die: int) -> None:
        calls, replace = 0, os.replace

        def counted(*arguments: Any) -> None:
            nonlocal calls
            calls += 1
            if calls >= die:
                raise _Killed
            replace(*arguments)

        try:
            with mock.patch("os.replace", counted):
                main(words)
        except _Killed:
            pass
        self.uncertain = True
        for name in names:  # it may have got so far or not: the store says what it is
            store = self.out / f"{name}.zarr"
            aside = self.out / ".staging" / f"{name}.zarr.aside"
            if not store.exists() and aside.exists():
                continue  # brought back by the next run, whatever that is about
            if store.exists() and (name not in self.mpp or (overwrite and name not in self.damaged)):
                self.mpp[name] = read_manifest(store)["settings"]["facts"]["mpp"]
            elif store.exists() and overwrite and not list(find_damage(store)):
                self.damaged.discard(name)
                self.mpp[name] = read_manifest(store)["settings"]["facts"]["mpp"]

    some = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True)

    @rule(names=some, mpp=st.sampled_from([0.5, 1.0]), overwrite=st.booleans(), export=st.booleans())
    def preprocess(self, names: list[str], mpp: float, overwrite: bool, export: bool) -> None:
        self.run(names, mpp, overwrite, export)

    @rule(names=some, mpp=st.sampled_from([0.5, 1.0]), overwrite=st.booleans(), die=st.integers(1, 40))
    def killed(self, names: list[str], mpp: float, overwrite: bool, die: int) -> None:
        self.run(names, mpp, overwrite, die=die)

    @precondition(lambda self: self.mpp and not self.uncertain)
    @rule(data=st.data())
    def refused_settings(self, data: st.DataObject) -> None:
        """A resolution that cannot be made: the stores stay."""
        name = data.draw(st.sampled_from(sorted(self.mpp)))
        words = ["preprocess", str(self.slides / f"{name}.tif"), str(self.out), "--mpp", "0.1", "--overwrite", "true"]
        assert main([*words, "--tissue", "none"]) == 1
        self.listed |= set(self.mpp) - self.damaged

    @precondition(lambda self: self.listed and not self.uncertain)
    @rule(data=st.data(), label=st.sampled_from(["x", "y", "=1+1", "a,b", 'q"']))
    def label(self, data: st.DataObject, label: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.listed)))
        path = self.out / "manifest.csv"
        rows = _rows(path)
        for row in rows.values():
            row.setdefault("label", "")
        rows[name]["label"] = self.labels[name] = label
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(next(iter(rows.values()))))
            writer.writeheader()
            writer.writerows(rows.values())

    @precondition(lambda self: self.listed and not self.uncertain)
    @rule(data=st.data())
    def drop_line(self, data: st.DataObject) -> None:
        """Someone loses a line of the manifest: the next run has it again, without the label."""
        name = data.draw(st.sampled_from(sorted(self.listed)))
        path = self.out / "manifest.csv"
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if not line.startswith(f"{name}.zarr,")))
        self.listed.discard(name)
        self.labels.pop(name, None)

    @precondition(lambda self: set(self.mpp) - self.damaged and not self.uncertain)
    @rule(data=st.data(), kind=st.sampled_from(["garbage", "removed"]))
    def damage(self, data: st.DataObject, kind: str) -> None:
        name = data.draw(st.sampled_from(sorted(set(self.mpp) - self.damaged)))
        store = self.out / f"{name}.zarr"
        if kind == "garbage":
            (store / "manifest.json").write_text("{")
            self.damaged.add(name)
        else:
            shutil.rmtree(store)
            del self.mpp[name]

    @precondition(lambda self: self.out.is_dir() and not self.uncertain and (self.mpp or self.listed))
    @rule()
    def verify(self) -> None:
        wrong = self.damaged | (self.listed - set(self.mpp))
        assert main(["verify", str(self.out)]) == (1 if wrong else 0)

    @invariant()
    def sources_are_as_they_were(self) -> None:
        for seed, name in enumerate(NAMES):
            pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
            assert np.array_equal(tifffile.imread(self.slides / f"{name}.tif"), pixels)

    @invariant()
    def all_agree(self) -> None:
        if not (self.out / "manifest.csv").is_file():
            return
        manifest = _rows(self.out / "manifest.csv")
        for name, label in self.labels.items():
            assert manifest[name]["label"] == label
        if self.uncertain:
            return
        assert self.listed == set(manifest)
        for name, mpp in self.mpp.items():
            store = self.out / f"{name}.zarr"
            assert store.is_dir()
            if name in self.damaged:
                continue
            assert list(find_damage(store)) == []
            facts = read_manifest(store)["settings"]["facts"]
            assert facts["mpp"] == mpp
            if name in manifest:
                assert float(manifest[name]["mpp"]) == mpp
                assert manifest[name]["site"] in (name.upper(), "")  # empty where its line was lost

    @invariant()
    def summary_tells_of_the_stores(self) -> None:
        path = self.out / "summary.csv"
        if self.uncertain or not path.is_file():
            return
        summary = {name: float(row["mpp"]) for name, row in _rows(path).items()}
        for name, mpp in summary.items():
            assert name not in self.mpp or name in self.damaged or mpp == self.mpp[name]
        assert set(self.mpp) - self.damaged <= set(summary)

    @invariant()
    def copies_are_of_their_stores(self) -> None:
        for copy in (self.out / "ngff-0.4").glob("*.zarr"):
            if self.uncertain or copy.stem not in self.mpp or copy.stem in self.damaged:
                continue
            assert json.loads((copy / ".zattrs").read_text())["multiscales"]
            assert is_current(self.out / copy.name, copy)


@pytest.mark.slow
def test_stores_manifest_and_summary_agree(count: Callable[..., int], record_result: Callable[..., None]) -> None:
    wanted = count(ci=8, full=2000)
    Cohort.sequences = 0
    settings = hypothesis.settings(max_examples=wanted, stateful_step_count=count(ci=10, full=14), deadline=None)
    with redirect_stdout(io.StringIO()):  # thousands of tables
        run_state_machine_as_test(Cohort, settings=settings)
    assert Cohort.sequences >= wanted
    record_result("cohort_machine", {"sequences without disagreement": Cohort.sequences})  # one would have ended it
