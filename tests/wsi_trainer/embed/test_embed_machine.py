"""Whatever is done to a folder of features, a file that is there holds the features of its slide, or is refused.

A machine of hypothesis embeds some slides or others, with other patches or weights, changes and exchanges slides, kills
the command at any touch of the folder, has a second one work there at the same time, and damages what lies there. What
each file must hold it computes by itself: pixels by tifffile, features by plain PyTorch.
"""

from __future__ import annotations

import itertools
import shutil
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest import mock

import h5py
import numpy as np
import pytest
import tifffile
import torch
import yaml
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from lightning_plugin import Box
from tests.machines import DAMAGES, Machine, go_through, quietly
from tests.stopping import go_on, started, stopped
from wsi_trainer.cli import main
from wsi_trainer.data.features import FeatureSource
from wsi_trainer.errors import UserError
from wsi_trainer.models import ResNet
from wsi_trainer.slides import staging

NAMES = ("a", "b", "c")
SIZE = 16
MEAN, STD = np.array([0.8, 0.7, 0.8]), np.array([0.2, 0.2, 0.2])  # what a config that names no others means


def network(weights: int) -> torch.nn.Module:
    torch.manual_seed(weights)
    return ResNet((4, 6), norm="group")


def pixels(content: int) -> np.ndarray:
    side = 48 + 16 * (content % 3)
    return np.random.default_rng(content).integers(0, 256, (side, 64, 3), np.uint8)


def write_slide(path: Path, content: int) -> None:
    tifffile.imwrite(path, pixels(content), photometric="rgb", resolution=(20000, 20000), resolutionunit="CENTIMETER")


@dataclass(frozen=True)
class Asked:
    """What decides about features."""

    weights: int = 0
    step: int = SIZE


@dataclass(frozen=True)
class Run:
    """A command: which slides, what of them, and what does not matter to the result."""

    names: tuple[str, ...]
    asked: Asked
    batch: int
    skip: bool


@cache
def expected(content: int, asked: Asked) -> dict[tuple[int, int], np.ndarray]:
    """The features of each patch, by the place of its corner."""
    image = pixels(content)
    height, width = image.shape[:2]
    corners = [(x, y) for y in range(0, height - SIZE + 1, asked.step) for x in range(0, width - SIZE + 1, asked.step)]
    crops = np.stack([(image[y : y + SIZE, x : x + SIZE] / 255 - MEAN) / STD for x, y in corners])
    with torch.no_grad():
        vectors = network(asked.weights).double()(torch.from_numpy(crops.transpose(0, 3, 1, 2))).mean((2, 3))
    return dict(zip(corners, vectors.numpy(), strict=True))


RUNS = st.builds(
    Run,
    names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True).map(tuple),
    asked=st.builds(Asked, weights=st.sampled_from([0, 0, 0, 1]), step=st.sampled_from([SIZE, SIZE, SIZE, 24])),
    batch=st.sampled_from([2, 3, 50]),
    skip=st.booleans(),
)


class Features(Machine):
    """A folder of slides, and the folder of their features."""

    weights: Path

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.out = self.root / "out"
        self.contents = {name: number for number, name in enumerate(NAMES)}
        for name, content in self.contents.items():
            write_slide(self.root / f"{name}.tif", content)
        self.next = itertools.count(len(NAMES))
        self.lists = itertools.count()
        self.made: dict[str, tuple[int, Asked]] = {}  # of files that are there
        self.damaged: set[str] = set()

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    def words(self, run: Run) -> list[str]:
        table = self.root / f"list{next(self.lists)}.csv"
        table.write_text("slide\n" + "".join(f"{name}.tif\n" for name in run.names))
        backbone = {"class_path": "wsi_trainer.models.ResNet", "init_args": {"widths": [4, 6], "norm": "group"}}
        encoder = {"class_path": "wsi_trainer.models.PatchEncoder", "init_args": {"size": SIZE, "network": backbone}}
        patches = {"size": SIZE, "over": "slide", "stride": run.asked.step}
        content = {
            "model": {"backbone": encoder, "pretrained": str(self.weights / f"{run.asked.weights}.pt")},
            "data": {"manifest": str(table), "patches": patches, "on_error": "skip" if run.skip else "stop"},
            "train": {"accelerator": "cpu", "precision": "32-true"},
        }
        config = table.with_suffix(".yaml")
        config.write_text(yaml.safe_dump(content))
        return ["embed", f"--config={config}", f"--out={self.out}", f"--batch={run.batch}"]

    def here(self, words: list[str]) -> tuple[int, str]:
        """Run a command in this process; its exit code and what it said."""
        with quietly() as (out, err):
            code = main(words)
        assert code in (0, 2), err.getvalue()
        assert "Traceback" not in err.getvalue()
        return code, out.getvalue() + err.getvalue()

    def file(self, name: str) -> Path:
        return self.out / f"{name}.h5"

    def refused(self, run: Run) -> str | None:
        """The first slide of which there is a file of something else, or one that cannot be read."""
        for name in run.names:
            if name in self.damaged or self.made.get(name, self.wanted(name, run)) != self.wanted(name, run):
                return name
        return None

    def wanted(self, name: str, run: Run) -> tuple[int, Asked]:
        return self.contents[name], run.asked

    def reads_well(self, name: str) -> bool:
        """Whether a file can be read, by who trains on it; then it holds what it must."""
        try:
            source = FeatureSource(self.file(name))
            found = source.read(Box.whole(source.shape[2:]))[0, :, :, 0].T.numpy()
        except UserError:
            return False
        with h5py.File(self.file(name)) as file:
            corners = [tuple(map(int, corner)) for corner in file["coords"][:]]
        want = expected(*self.made[name])
        assert sorted(corners) == sorted(want), name
        np.testing.assert_allclose(found, np.stack([want[corner] for corner in corners]), atol=2e-5)
        return True

    def look(self, run: Run) -> None:
        """See what a command that may have died has left of the slides that it was about."""
        for name in run.names:
            if self.file(name).is_file() and name not in self.made:
                self.made[name] = self.wanted(name, run)

    # Commands

    @rule(run=RUNS)
    def embed(self, run: Run) -> None:
        self.does(run)

    def does(self, run: Run) -> None:
        stop = self.refused(run)
        code, said = self.here(self.words(run))
        assert code == (2 if stop else 0), (said, self.made, self.damaged)
        if stop:
            assert f"{stop}.h5" in said
        for name in run.names:
            if name == stop:
                break
            self.made.setdefault(name, self.wanted(name, run))
            assert self.file(name).is_file()
        if not stop:
            assert not list(self.out.glob(f".{run.names[0]}*"))

    @rule(run=RUNS, touches=st.integers(1, 40))
    def killed(self, run: Run, touches: int) -> None:
        self.counted["kills"] += 1
        process = started(self.words(run), self.out, self.root / "log", touches, signal.SIGKILL)
        process.join()
        assert process.exitcode in (0, 2, -signal.SIGKILL), (self.root / "log").read_text()
        self.look(run)

    @rule(run=RUNS, other=RUNS, same=st.booleans(), touches=st.integers(1, 40))
    def at_the_same_time(self, run: Run, other: Run, same: bool, touches: int) -> None:
        """While one command stands in the middle of its work, another does its own in the same folder."""
        self.counted["concurrent"] += 1
        if same:
            other = Run(other.names, run.asked, other.batch, other.skip)
        before = dict(self.made)
        first = started(self.words(run), self.out, self.root / "log", touches, signal.SIGSTOP)
        stands = stopped(first)
        with mock.patch.object(staging, "PATIENCE", 0.05):
            second, said = self.here(self.words(other))
        code = go_on(first)
        log = (self.root / "log").read_text()
        assert code in (0, 2) and "Traceback" not in log, log
        if not stands or run.asked != other.asked:
            self.look_at_either(run, other)
            return
        self.look(run)
        self.look(other)
        if self.refused(run) is None and before == self.made:
            assert code == 0, log
        for result, about, text in ((code, run, log), (second, other, said)):
            if result == 0:
                assert all(self.file(name).is_file() for name in about.names)
            elif self.refused(about) is None:
                assert "another" in text, text

    def look_at_either(self, run: Run, other: Run) -> None:
        """Of two commands that want other things, either may have made a file; it is all of one of them."""
        for name in {*run.names, *other.names} - self.made.keys():
            if not self.file(name).is_file():
                continue
            wanted = [self.wanted(name, r) for r in (run, other) if name in r.names]
            right = []
            for self.made[name] in wanted:
                try:
                    right += [self.made[name]] if self.reads_well(name) else []
                except AssertionError:
                    continue
            assert right, f"{name}.h5 holds what neither wants"
            self.made[name] = right[0]

    # Accidents and changes

    @precondition(lambda self: self.made.keys() - self.damaged)
    @rule(data=st.data(), kind=st.sampled_from(sorted(DAMAGES)), place=st.floats(0, 0.999))
    def damage(self, data: st.DataObject, kind: str, place: float) -> None:
        self.counted["damages"] += 1
        name = data.draw(st.sampled_from(sorted(self.made.keys() - self.damaged)))
        whole = self.file(name).read_bytes()
        DAMAGES[kind](self.file(name), place)
        if kind == "removed":
            del self.made[name]
        elif not self.reads_well(name):  # who trains on it is told; nothing else is believed of it
            code, _ = self.here(self.words(Run((name,), self.made[name][1], 50, False)))
            if code:
                self.damaged.add(name)
            else:  # what says whose features these are is sound, and nobody has looked at the features
                self.file(name).write_bytes(whole)

    @precondition(lambda self: self.damaged)
    @rule(data=st.data())
    def clear_away(self, data: st.DataObject) -> None:
        """What the message says: a file that cannot be read is removed, and made again."""
        name = data.draw(st.sampled_from(sorted(self.damaged)))
        self.file(name).unlink()
        self.damaged.discard(name)
        del self.made[name]

    @precondition(lambda self: self.out.is_dir() and list(self.out.glob(".*.rows")))
    @rule(data=st.data(), kind=st.sampled_from(sorted(DAMAGES)), place=st.floats(0, 0.999))
    def damage_of_work_under_way(self, data: st.DataObject, kind: str, place: float) -> None:
        self.counted["damages"] += 1
        path = data.draw(st.sampled_from(sorted(p for p in self.out.glob(".*.*") if p.suffix in (".rows", ".json"))))
        if path.stat().st_size:
            DAMAGES[kind](path, place)

    @rule(name=st.sampled_from(NAMES))
    def change_slide(self, name: str) -> None:
        """It is scanned again: a file of the features of the old one is not the new one's."""
        self.contents[name] = next(self.next)
        write_slide(self.root / f"{name}.tif", self.contents[name])

    @invariant()
    def files_hold_what_they_must(self) -> None:
        there = {path.stem for path in self.out.glob("*.h5")} if self.out.is_dir() else set()
        assert there == self.made.keys()
        for name in there - self.damaged:
            assert self.reads_well(name), name


@pytest.mark.slow
def test_a_folder_of_features_holds_no_wrong_one(
    tmp_path: Path, count: Callable[..., int], record_result: Callable[..., None], minutes: float
) -> None:
    Features.weights = tmp_path
    for weights in (0, 1):
        torch.save(network(weights).state_dict(), tmp_path / f"{weights}.pt")
    found = go_through(Features, count(ci=4, full=200), count(ci=6, full=14), minutes)
    record_result("state_machine_embed", {**found, "defects_found": DEFECTS})


#: What it has found, each with its test.
DEFECTS: list[dict[str, str]] = [
    {
        "what": "Features of a slide that has changed since, or of other patches, were kept as if they were right",
        "test": "tests/wsi_trainer/embed/test_embed.py::test_what_a_folder_holds_is_what_would_be_made",
    },
    {
        "what": "With data.on_error skip, files of another encoder were passed over, and the command ended well",
        "test": (
            "tests/wsi_trainer/embed/test_embed.py::"
            "test_files_of_other_weights_are_refused_also_where_slides_may_be_left_out"
        ),
    },
    {
        "what": "Two commands on one folder wrote the same rows",
        "test": "tests/wsi_trainer/embed/test_embed.py::test_a_folder_is_one_runs_at_a_time",
    },
    {
        "what": "Rows of work under way were believed when they had changed on the disk, or the slide had",
        "test": "tests/wsi_trainer/embed/test_embed.py::test_rows_that_have_changed_are_made_again",
    },
]
