"""A sample of the fuzzing, the same each time; and whatever was found by more of it (`make fuzz`) stays mended.

The sample runs in a process of its own, since a decoder in C may end it.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzz.cases import FAULTS, Bench, Outcome
from tests.fuzz.kinds import Target
from tests.fuzz.runner import Runner
from tests.fuzz.targets import TARGETS

KEPT = Path(__file__).parent / "fuzz" / "found"
SAMPLE = 8
"""Cases of each format in CI."""


def test_a_sample_of_changed_files(tmp_path: Path, count: Callable[..., int]) -> None:
    faults, kinds = [], Counter[str]()
    with Runner(tmp_path) as runner:
        for name in TARGETS:
            assert runner.run(name, -1)["kind"] == "same", f"{name}: a good file is not read as its judge does"
            for seed in range(count(ci=SAMPLE, full=500)):
                outcome = runner.run(name, seed)
                kinds[outcome["kind"]] += 1
                if outcome["kind"] in FAULTS:
                    faults.append((name, seed, outcome))
                if outcome["kind"] == "none":
                    break
    assert not faults
    assert kinds["refused"] and kinds["same"] and kinds["agreed"], kinds


FOUND = sorted(KEPT.glob("*/*/outcome.json"))


@pytest.mark.parametrize("about", FOUND, ids=lambda path: "/".join(path.parts[-3:-1]))
def test_what_was_found_stays_mended(about: Path, tmp_path: Path) -> None:
    said = json.loads(about.read_text())
    target = TARGETS[said["target"]]
    bench = Bench(tmp_path)
    good = tmp_path / "good"
    good.mkdir()
    before = target.make(good)
    named = Path(said["file"]).parts[1:]
    changed = shutil.copytree(about.parent / "files", tmp_path / "changed")
    whole = before == [good]  # a folder of files that are one slide
    path = changed / Path(said["file"]).parts[0] / ("" if whole else named[0])
    origin = good if whole else next(p for p in before if p.name == path.name)
    outcome = bench.judge(target, origin, path)
    assert outcome.kind not in FAULTS, outcome


# -- the judge itself: it must see each fault


def _target(read: Callable[[Path], object], truth: Callable[[Path], object] | None = None) -> Target:
    return Target("t", lambda folder: [], read, truth)


@pytest.mark.parametrize(
    ("read", "truth", "kind"),
    [
        (lambda path: path.read_bytes(), None, "wrong success"),
        (lambda path: path.read_bytes(), lambda path: b"changed", "agreed"),
        (lambda path: path.read_bytes(), lambda path: b"else", "wrong success"),
        (lambda path: b"always", None, "same"),
        (lambda path: {}["key"], None, "unclear error"),
        (lambda path: (_ for _ in ()).throw(__import__("wsi_trainer.errors").errors.UserError("some file")), None,
         "unclear error"),
        (lambda path: (_ for _ in ()).throw(__import__("wsi_trainer.errors").errors.UserError(f"{path} is bad")), None,
         "refused"),
    ],
)  # fmt: skip
def test_the_judge_sees_faults(
    tmp_path: Path, read: Callable[[Path], object], truth: Callable[[Path], object] | None, kind: str
) -> None:
    (tmp_path / "good.x").write_bytes(b"good")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "good.x").write_bytes(b"changed")
    found = Bench(tmp_path).judge(_target(read, truth), tmp_path / "good.x", tmp_path / "odd" / "good.x")
    assert isinstance(found, Outcome) and found.kind == kind


def test_a_crash_and_a_hang_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child is another program here: one that dies of a signal, one that says nothing."""
    import subprocess
    import sys

    import tests.fuzz.runner as runner_module

    monkeypatch.setattr(runner_module, "PATIENCE", 1.0)
    for script, kind in (("import os; os.kill(os.getpid(), 11)", "crash"), ("import time; time.sleep(60)", "hang")):
        runner = Runner(tmp_path)
        runner._child = subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.stdin.readline(); {script}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        with runner:
            assert runner.run("any", 0)["kind"] == kind
