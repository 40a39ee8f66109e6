"""Runs cases in a child, which is begun anew when a case ends it or does not come back."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.fuzz.kinds import Target

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0
"""Seconds of a case: after so long it hangs. The slowest takes about two."""
STARTING = 300.0


class Runner:
    """Cases by name and seed. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def run(self, name: str, seed: int) -> dict[str, str]:
        """The outcome of a case."""
        child = self._begun()
        assert child.stdin is not None
        child.stdin.write(f"{name}\t{seed}\n".encode())
        child.stdin.flush()
        line = self._line(child, PATIENCE)
        if line:
            outcome = dict(json.loads(line))
            if outcome["kind"] == "broken":
                raise RuntimeError(f"the fuzzing itself fails at {name}, seed {seed}:\n{outcome['said']}")
            return outcome
        ended = child.poll()
        self._end()
        if line is None:
            return {"kind": "hang", "said": f"more than {PATIENCE:g} s", "changes": "", "file": ""}
        reason = signal.Signals(-ended).name if ended is not None and ended < 0 else f"exit {ended}"
        return {"kind": "crash", "said": reason, "changes": "", "file": ""}

    def changed(self) -> Path:
        """The folder with the changed file of the last case."""
        return Path((self._folder / "changed_at").read_text())

    def _begun(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LIGHTNING_PLUGIN_CACHE": ""}
            self._child = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.child", str(self._folder)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment,
            )  # fmt: skip
            if self._line(self._child, STARTING) != b"ready\n":
                raise RuntimeError("the child of the fuzzing does not begin; run python -m tests.fuzz.child FOLDER")
        return self._child

    def _line(self, child: subprocess.Popen[bytes], seconds: float) -> bytes | None:
        """A line of the child; nothing where it has ended, None where none came in time."""
        assert child.stdout is not None
        ready, _, _ = select.select([child.stdout], [], [], seconds)
        if not ready:
            return None
        line = child.stdout.readline()
        if not line:
            child.wait(10)
        return line

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None


def keep(target: Target, seed: int, outcome: dict[str, str], changed: Path, kept: Path) -> None:
    """Keep the changed file of a fault, which a test reads from then on."""
    folder = kept / target.name.replace(" ", "_").replace(",", "") / str(seed)
    shutil.rmtree(folder, ignore_errors=True)
    if changed.is_dir():
        shutil.copytree(changed, folder / "files")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "outcome.json").write_text(json.dumps({"target": target.name, "seed": seed, **outcome}, indent=1) + "\n")
