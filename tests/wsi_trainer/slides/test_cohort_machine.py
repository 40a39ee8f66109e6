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
import signal
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tifffile
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from tests.machines import Machine, go_through
from tests.stopping import go_on, started, stopped
from wsi_trainer.cli import main
from wsi_trainer.slides import staging
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


class Cohort(Machine):
    """A folder of slides and the folder of their stores."""

    def __init__(self) -> None:
        super().__init__()
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
        words = self.words(names, mpp, overwrite)
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

    def words(self, names: list[str], mpp: float, overwrite: bool, table: str = "list.csv") -> list[str]:
        path = self.root / table
        path.write_text("slide,site\n" + "".join(f"slides/{name}.tif,{name.upper()}\n" for name in names))
        words = ["preprocess", str(path), str(self.out), "--tissue", "none", "--workers", "1", "--stall_minutes", "0"]
        return words + ["--mpp", str(mpp)] * (mpp != 0.5) + ["--overwrite", "true"] * overwrite

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
        self.look(names, overwrite)

    def look(self, names: list[str], overwrite: bool) -> None:
        """See how far a run over some slides has got that did not end well."""
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
        self.counted["kills"] += 1
        self.run(names, mpp, overwrite, die=die)

    @rule(names=some, mpp=st.sampled_from([0.5, 1.0]), overwrite=st.booleans(), touches=st.integers(1, 60))
    def killed_at_once(self, names: list[str], mpp: float, overwrite: bool, touches: int) -> None:
        """In a process of its own, at any touch of the folder."""
        self.counted["kills"] += 1
        log = self.root / "log"
        process = started(self.words(names, mpp, overwrite), self.out, log, touches, signal.SIGKILL)
        process.join()
        assert process.exitcode in (0, 1, -signal.SIGKILL), log.read_text()
        self.look(names, overwrite)

    @rule(
        names=some, others=some, mpps=st.tuples(*[st.sampled_from([0.5, 1.0])] * 2),
        overwrites=st.tuples(st.booleans(), st.booleans()), touches=st.integers(1, 60),
    )  # fmt: skip
    def at_the_same_time(
        self, names: list[str], others: list[str], mpps: tuple[float, float], overwrites: tuple[bool, bool],
        touches: int,
    ) -> None:  # fmt: skip
        """While one run stands in the middle of its work, another does its own in the same folder."""
        self.counted["concurrent"] += 1
        log = self.root / "log"
        first = started(self.words(names, mpps[0], overwrites[0]), self.out, log, touches, signal.SIGSTOP)
        stopped(first)
        with mock.patch.object(staging, "PATIENCE", 0.05):
            assert main(self.words(others, mpps[1], overwrites[1], "other.csv")) in (0, 1, 2)
        assert go_on(first) in (0, 1, 2) and "Traceback" not in (said := log.read_text()), said
        self.look(names, any(overwrites))
        self.look(others, any(overwrites))

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
        self.counted["damages"] += 1
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
def test_stores_manifest_and_summary_agree(
    count: Callable[..., int], record_result: Callable[..., None], minutes: float
) -> None:
    with redirect_stdout(io.StringIO()):  # thousands of tables
        found = go_through(Cohort, count(ci=8, full=2000), count(ci=10, full=14), minutes)
    record_result("state_machine_cohort", {**found, "defects_found": DEFECTS})


#: What it has found, each with its test.
DEFECTS = [
    {
        "what": (
            "A run that wrote the tables while another replaced a store left the old size of a pixel in manifest.csv"
        ),
        "test": (
            "tests/wsi_trainer/slides/test_cohort.py::"
            "test_a_store_that_is_replaced_while_tables_are_written_is_told_of_by_the_next_run"
        ),
    }
]
