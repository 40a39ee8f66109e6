"""What work costs: time, memory and energy of the process that does it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from wsi_trainer.fit.run_folder import as_written, read_json, write_json

POWERCAP = Path("/sys/class/powercap")
"""Where Linux counts the energy of the processor's packages, if the kernel lets this user read it."""
PAUSE = 0.05
"""Seconds between two looks at memory and energy."""


@dataclass(frozen=True)
class Cost:
    """What a piece of work took; several pieces of one work add up."""

    seconds: float = 0.0
    processor_seconds: float = 0.0
    process_bytes: int = 0
    """Most resident memory of the process that was seen while it worked."""
    joules: float | None = 0.0
    """Energy of the processor's packages, all programs together; None where it cannot be read."""

    def __add__(self, other: Cost) -> Cost:
        known = self.joules is not None and other.joules is not None
        return Cost(
            self.seconds + other.seconds,
            self.processor_seconds + other.processor_seconds,
            max(self.process_bytes, other.process_bytes),
            (self.joules or 0.0) + (other.joules or 0.0) if known else None,
        )

    @staticmethod
    def read(path: Path) -> Cost:
        """What a file says; nothing where there is none."""
        with as_written(path):
            return Cost(**read_json(path))


@contextmanager
def costing(path: Path) -> Iterator[None]:
    """Adds what is done within to the file, also where it fails: a run that is continued costs all of its parts."""
    watch, began = Watch(), (time.perf_counter(), time.process_time())
    watch.start()
    try:
        yield
    finally:
        watch.stop()
        spent = time.perf_counter() - began[0], time.process_time() - began[1]
        write_json(path, asdict(Cost.read(path) + Cost(*spent, watch.process_bytes, watch.joules)))


class Watch:
    """Looks again and again at what has only a present value: memory, and counters that begin anew when they are full.

    Args:
        powercap: Where the counters of energy are.
    """

    def __init__(self, powercap: Path = POWERCAP) -> None:
        self._process = psutil.Process()
        self._counters = [Counter(zone) for zone in sorted(powercap.glob("*-rapl:*")) if zone.name.count(":") == 1]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cost", daemon=True)
        self.process_bytes = 0

    @property
    def joules(self) -> float | None:
        """The energy of all packages so far; None where a counter cannot be read, or none is there."""
        found = [counter.microjoules for counter in self._counters]
        return sum(n for n in found if n is not None) / 1e6 if found and None not in found else None

    def start(self) -> None:
        self.look()
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()
        self.look()

    def look(self) -> None:
        """Take note of the present values."""
        self.process_bytes = max(self.process_bytes, self._process.memory_info().rss)
        for counter in self._counters:
            counter.look()

    def _run(self) -> None:
        while not self._ended.wait(PAUSE):
            self.look()


class Counter:
    """The energy of one package of the processor, in microjoules since the first look."""

    def __init__(self, zone: Path) -> None:
        self._zone = zone
        self._last: int | None = None
        self.microjoules: int | None = 0

    def look(self) -> None:
        """Add what was used since the last look; the counter begins anew at its range."""
        try:
            now = int((self._zone / "energy_uj").read_text())
            if self._last is not None and self.microjoules is not None:
                begun_anew = int((self._zone / "max_energy_range_uj").read_text()) if now < self._last else 0
                self.microjoules += now - self._last + begun_anew
            self._last = now
        except (OSError, ValueError):
            self.microjoules = None
