"""One case: a good file, changed by a seed, read, and judged."""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from tests.fuzz.kinds import Target, Unjudged, digest
from tests.fuzz.mutations import mutated
from tests.fuzz.targets import TARGETS
from wsi_trainer.cli.entry import is_engine_error
from wsi_trainer.errors import UserError

OUTCOMES = ("refused", "same", "agreed", "unjudged", "wrong success", "unclear error", "crash", "hang")
FAULTS = ("wrong success", "unclear error", "crash", "hang")


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Attributes:
        kind: one of `OUTCOMES`: an error of the project that names the file; a success as before the change; one that
            another library agrees with; one that none can judge; and the faults.
        said: the error, or what differs.
        changes: the names of the changes.
        file: the file that was changed, within the case's folder.
    """

    kind: str
    said: str = ""
    changes: str = ""
    file: str = ""

    def record(self) -> dict[str, str]:
        return asdict(self)


class Bench:
    """Good files of each format, made once, and a folder in which copies are changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Sequence[Path]] = {}
        self._before: dict[Path, str] = {}

    def run(self, name: str, seed: int) -> Outcome:
        """The case of a format and a seed; the changed copy is left in `changed` until the next one."""
        target = TARGETS[name]
        good = self._good(target)
        if not good:
            return Outcome("none", "there is no such file here")
        chance = random.Random(f"{name}:{seed}")
        path = chance.choice(good)
        copy = self._copy(target, path)
        root = copy if copy.is_dir() else copy.parent
        files = sorted(file for file in root.glob(target.among if copy.is_dir() else copy.name) if file.is_file())
        file = chance.choice(files)
        data, changes = mutated(chance, file.read_bytes(), target.kinds)
        file.write_bytes(data)
        if target.after is not None:
            target.after(file)
        found = self.judge(target, path, copy)
        return Outcome(found.kind, found.said, changes, str(file.relative_to(self.changed)))

    def unchanged(self, name: str) -> Outcome:
        """Good files as they are: each is read, and its judge says the same of it."""
        target = TARGETS[name]
        for path in self._good(target):
            found = digest(quietly(target.read, self._copy(target, path)))
            try:
                expected = found if target.truth is None else digest(quietly(target.truth, path))
            except Unjudged:
                continue
            if found != expected:
                return Outcome("wrong success", f"{path.name}: its judge says something else before any change")
        return Outcome("same")

    @property
    def changed(self) -> Path:
        return self._folder / "changed"

    def judge(self, target: Target, good: Path, path: Path) -> Outcome:
        """Read a changed file."""
        try:
            found = quietly(target.read, path)
        except Unjudged:
            return Outcome("unjudged")
        except Exception as error:
            return Outcome(*classified(error, target.named or path.stem.partition(".")[0]))
        said = digest(found)
        if good not in self._before:
            self._before[good] = digest(quietly(target.read, good))
        if said == self._before[good]:
            return Outcome("same")
        if target.truth is None:
            return Outcome("wrong success", "another content than before the change")
        try:
            expected = quietly(target.truth, path)
        except Unjudged:
            return Outcome("unjudged")
        except Exception as error:  # the judge stumbled over what the project took for good
            return Outcome("unjudged", f"{type(error).__name__}: {error}"[:200])
        return Outcome("agreed") if digest(expected) == said else Outcome("wrong success", difference(found, expected))

    def _good(self, target: Target) -> Sequence[Path]:
        if target.name not in self._made:
            folder = self._folder / "good" / target.name.replace(" ", "_").replace(",", "")
            folder.mkdir(parents=True)
            self._made[target.name] = quietly(target.make, folder)
        return self._made[target.name]

    def _copy(self, target: Target, path: Path) -> Path:
        shutil.rmtree(self.changed, ignore_errors=True)
        within = path.relative_to(self._folder / "good")
        copy = self.changed / within
        copy.parent.mkdir(parents=True)
        if path.is_dir():
            shutil.copytree(path, copy)
        else:
            shutil.copyfile(path, copy)
        return copy


def quietly(call: Any, path: Path) -> Any:
    with warnings.catch_warnings(action="ignore"), redirect_stderr(StringIO()):
        return call(path)


def classified(error: Exception, named: str) -> tuple[str, str]:
    """Whether an error is one of the project's own, in one line that names the file."""
    said = f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
    clear = isinstance(error, UserError) or is_engine_error(error) or (isinstance(error, OSError) and error.filename)
    if not clear:
        return "unclear error", said
    if "\n" in str(error).strip():
        return "unclear error", f"of several lines: {said}"
    return ("refused", said) if named in str(error) else ("unclear error", f"without the file's name: {said}")


def difference(found: Any, expected: Any) -> str:
    return f"{str(found)[:150]} instead of {str(expected)[:150]}"
