"""Whatever is done to the folder of a run, it ends with the weights of the run to which nothing was done.

A machine of hypothesis begins runs, continues them, kills them by any signal at any touch of the folder, lets a second
one come in between, damages checkpoints and other files, asks for another network or learning rate half way, and looks
at the folder with the other commands. Each checkpoint that is there has the weights that the undisturbed run had at
that step, to the bit.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from torch import Tensor

from tests.machines import DAMAGES, Machine, go_through, quietly
from tests.stopping import go_on, started, stopped
from wsi_trainer.cli import main
from wsi_trainer.fit import run as runs
from wsi_trainer.fit.run import Run
from wsi_trainer.fit.trainer import Checkpoints
from wsi_trainer.synthetic import generate

ENDED = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143, signal.SIGINT: 130}
#: What a command may say of a file that is not what was written.
SAID = ("damaged", "empty", "cut short", "no file of weights", "cannot be read", "holds more than weights")
State = dict[str, Tensor]


def state_of(path: Path) -> tuple[int, State]:
    content = torch.load(path, weights_only=True)
    return int(content["global_step"]), content["state_dict"]


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


class Fit(Machine):
    """A folder of slides, and the folder of a run."""

    manifest: Path
    wholes: dict[str, dict[int, State]]
    """Of each engine, the weights after each step of the run to which nothing is done."""

    @initialize(engine=st.sampled_from(["null", "null", "1MiB"]))
    def begin(self, engine: str) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.engine = engine
        if engine not in self.wholes:
            self.wholes[engine] = self.undisturbed()
        self.whole = self.wholes[engine]
        self.folder = Run(self.root / "run")
        self.spoilt: dict[Path, bytes] = {}  # what was whole

    def teardown(self) -> None:
        if hasattr(self, "root"):
            shutil.rmtree(self.root)

    def words(self, command: str, *more: str, out: str = "run") -> list[str]:
        return [
            command, f"--out={self.root / out}", f"--data.manifest={self.manifest}",
            "--model.backbone=wsi_trainer.models.VGG", "--model.backbone.widths=[2,4]", "--model.backbone.convs=1",
            "--model.dropout=0.3", "--train.epochs=2", "--train.checkpoint_every=1", "--train.accelerator=cpu",
            f"--train.budget={self.engine}", "--train.resamples=5", *more,
        ]  # fmt: skip

    def undisturbed(self) -> dict[int, State]:
        found: dict[int, State] = {}
        right = Checkpoints.save_checkpoint

        def noted(checkpoints: Checkpoints, content: dict[str, Any], *more: Any, **options: Any) -> None:
            state = {name: value.clone() for name, value in content["state_dict"].items()}
            assert same(found.setdefault(content["global_step"], state), state)
            right(checkpoints, content, *more, **options)

        with mock.patch.object(Checkpoints, "save_checkpoint", noted):
            code, said = self.here(self.words("fit", out="whole"))
        assert code == 0, said
        return found

    def here(self, words: list[str]) -> tuple[int, str]:
        with quietly() as (out, err):
            code = main(words)
        said = out.getvalue() + err.getvalue()
        assert (code in (0, 2) or (code, words[0]) == (1, "status")) and "Traceback" not in said, said
        return code, said

    @property
    def last(self) -> Path:
        return self.folder.checkpoint_path("last")

    @property
    def steps(self) -> int:
        """The last step of which there is a checkpoint; -1 without one."""
        return state_of(self.last)[0] if self.last.is_file() and self.last not in self.spoilt else -1

    # Training

    @rule()
    def fit(self) -> None:
        """To the end, or not at all where there is a run."""
        begun = self.folder.begun
        code, said = self.here(self.words("fit"))
        assert code == (2 if begun else 0), said
        assert not begun or "holds a run already" in said
        self.ended(code)

    @rule()
    def resume(self) -> None:
        code, said = self.here(self.words("fit", "--resume=last"))
        if self.last in self.spoilt:
            assert code == 2 and any(words in said for words in SAID), said
        else:
            assert code == 0, said
        self.ended(code)

    def ended(self, code: int) -> None:
        if code == 0:
            assert self.steps == max(self.whole)
            assert self.folder.evaluation("test").is_file() and self.folder.predictions("test").is_file()

    @rule(how=st.sampled_from(sorted(ENDED)), touches=st.integers(1, 160), resume=st.booleans())
    def killed(self, how: signal.Signals, touches: int, resume: bool) -> None:
        self.counted["kills"] += 1
        more = ["--resume=last"] if resume else []
        process = started(self.words("fit", *more), self.folder.path, self.root / "log", touches, how)
        process.join()
        log = (self.root / "log").read_text()
        assert process.exitcode in (0, 2, ENDED[how]) and "Traceback" not in log, (process.exitcode, log[-3000:])

    @precondition(lambda self: not self.spoilt)
    @rule(touches=st.integers(1, 160))
    def at_the_same_time(self, touches: int) -> None:
        """While a run stands in the middle of its work, somebody continues it elsewhere."""
        self.counted["concurrent"] += 1
        log = self.root / "log"
        log.unlink(missing_ok=True)
        first = started(self.words("fit", "--resume=last"), self.folder.path, log, touches, signal.SIGSTOP)
        stands = stopped(first)
        with mock.patch.object(runs, "SEARCHING", 0.05):
            code, said = self.here(self.words("fit", "--resume=last"))
        assert go_on(first) == 0, log.read_text()[-3000:]
        # It may stand before it has taken the folder, or when it has let it go: then the second one is the first.
        assert code == 0 or (stands and "is being written by another run" in said), said
        self.ended(0)

    @precondition(lambda self: self.steps > 0)
    @rule(word=st.sampled_from(["model.learning_rate=0.5", "model.backbone.widths=[3,4]", "model.dropout=0.1"]))
    def another_model(self, word: str) -> None:
        """Weights and optimizer are those of the checkpoint: what else is asked for cannot be had."""
        before, config = self.last.read_bytes(), self.folder.config.read_text()
        code, said = self.here(self.words("fit", "--resume=last", f"--{word}"))
        key = word.partition("=")[0].rpartition(".")[2]
        assert code == 2 and f"{key} was" in said, said
        assert self.last.read_bytes() == before and self.folder.config.read_text() == config

    # Other commands

    @rule(command=st.sampled_from(["validate", "test", "predict", "report", "status"]))
    def look(self, command: str) -> None:
        before = self.last.read_bytes() if self.last.is_file() else None
        if command in ("report", "status"):
            words = [command, str(self.folder.path)]
        else:
            more = [str(self.manifest)] if command == "predict" else []
            words = [command, str(self.folder.path), *more, "--overwrite"]
        self.here(words)
        assert (self.last.read_bytes() if self.last.is_file() else None) == before

    # Accidents

    @precondition(lambda self: self.steps >= 0)
    @rule(kind=st.sampled_from(sorted(DAMAGES)), place=st.floats(0, 0.999))
    def damage_checkpoint(self, kind: str, place: float) -> None:
        self.counted["damages"] += 1
        whole = self.last.read_bytes()
        DAMAGES[kind](self.last, place)
        if kind != "removed":
            self.spoilt[self.last] = whole

    @precondition(lambda self: self.spoilt)
    @rule(mend=st.booleans())
    def mend(self, mend: bool) -> None:
        """The file comes back from a copy, or is removed."""
        for path, whole in self.spoilt.items():
            path.write_bytes(whole) if mend else path.unlink(missing_ok=True)
        self.spoilt.clear()

    @precondition(lambda self: self.folder.status.is_file())
    @rule(
        name=st.sampled_from(["status", "metrics", "splits", "memory", "best"]),
        kind=st.sampled_from(sorted(DAMAGES)),
        place=st.floats(0, 0.999),
    )
    def damage_of_another_file(self, name: str, kind: str, place: float) -> None:
        self.counted["damages"] += 1
        path = self.folder.checkpoint_path("best") if name == "best" else getattr(self.folder, name)
        if path.is_dir():
            path = next(iter(sorted(path.rglob("*.csv"))), path)
        if not path.is_file() or not path.stat().st_size:
            return
        before = path.read_bytes()
        DAMAGES[kind](path, place)
        for words in (["status", str(self.folder.path)], ["report", str(self.folder.path)]):
            self.here(words)
        path.write_bytes(before)

    @invariant()
    def checkpoints_are_those_of_the_whole_run(self) -> None:
        if not hasattr(self, "folder"):
            return
        for which in ("last", "best"):
            path = self.folder.checkpoint_path(which)
            if path.is_file() and path not in self.spoilt:
                step, state = state_of(path)
                assert same(state, self.whole[step]), f"{which} at step {step}"


def prepare(machine: type[Fit], folder: Path | None = None) -> None:
    """The slides of all sequences."""
    splits = {"train": 0.5, "val": 0.25, "test": 0.25}
    folder = folder or Path(tempfile.mkdtemp())
    machine.manifest = generate(folder, slides=8, seed=3, splits=splits, workers=1, shape=(96, 96))
    machine.wholes = {}


@pytest.mark.slow
def test_a_run_ends_as_if_nothing_had_been(
    tmp_path: Path, count: Callable[..., int], record_result: Callable[..., None], minutes: float
) -> None:
    prepare(Fit, tmp_path)
    found = go_through(Fit, count(ci=2, full=100), count(ci=4, full=9), minutes)
    record_result("state_machine_fit", {**found, "defects_found": DEFECTS})


#: What it has found, each with its test.
DEFECTS: list[dict[str, str]] = [
    {
        "what": "Two runs in one folder wrote over each other's checkpoints",
        "test": "tests/wsi_trainer/fit/test_resume.py::test_a_folder_is_one_runs_at_a_time",
    },
    {
        "what": "A run continued with another learning rate went on with the old one, and config.yaml said the new one",
        "test": "tests/wsi_trainer/fit/test_resume.py::test_a_run_goes_on_with_the_model_it_began_with",
    },
]
