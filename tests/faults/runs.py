"""Runs in processes forked by the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.faults.places import Place
from tests.faults.seam import Seam

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120.0
"""Seconds of a run: after so long it hangs. The slowest takes a few."""


@dataclass(frozen=True)
class Ended:
    """How a run has ended: its exit code, or minus the signal, or None where it did not."""

    code: int | None
    left: bool
    said: str


class Server:
    """The server as a context manager."""

    def __init__(self, place: Place) -> None:
        self.place = place
        place.base.mkdir(parents=True, exist_ok=True)
        self.seam = Seam(place.base / "setting", place.now)
        environment = {**os.environ, **place.environment, **self.seam.environment, "PYTHONPATH": str(ROOT)}
        environment["TMPDIR"] = str(place.base)
        environment["PYTHONFAULTHANDLER"] = "1"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.server"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment, text=True,
        )  # fmt: skip
        self._logs = 0
        self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def begin(self, words: list[str], target: str = "wsi_trainer.cli:main", faulty: bool = False) -> tuple[int, Path]:
        """A run that has begun: its process, and its log."""
        self._logs += 1
        log = self.place.base / f"log-{self._logs % 8}.txt"
        log.unlink(missing_ok=True)
        job = {
            "log": str(log), "environment": self.place.environment, "folder": str(self.place.now), "target": target,
            "arguments": [words], "setting": str(self.seam.file) if faulty else None,
        }  # fmt: skip
        return int(self._ask({"start": job})), log

    def end(self, begun: tuple[int, Path], limit: float = PATIENCE) -> Ended:
        """Wait for it."""
        answer = self._ask({"wait": begun[0], "limit": limit})
        return Ended(answer["code"], answer["left"], begun[1].read_text(errors="replace"))

    def run(self, words: list[str], target: str = "wsi_trainer.cli:main", faulty: bool = False) -> Ended:
        ended = self.end(self.begin(words, target, faulty))
        self.seam.disarm()
        return ended

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the server of the faults has ended; run python -m tests.faults.server")
        return json.loads(line)
