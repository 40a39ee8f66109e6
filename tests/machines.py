"""What the state machines of the tests share: how a machine is run and counted, and how files are damaged.

A machine (of hypothesis) goes through random sequences of commands, each of which it does to the program and to a model
of its own; where the two disagree, the sequence is made as short as it can be, and shown.
"""

from __future__ import annotations

import io
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, ClassVar

import hypothesis
from hypothesis.stateful import RuleBasedStateMachine, invariant, run_state_machine_as_test


class Machine(RuleBasedStateMachine):
    """A machine of which it is counted what it has gone through."""

    counted: ClassVar[Counter[str]]

    def __init__(self) -> None:
        super().__init__()
        self.counted["sequences"] += 1
        self.counted["steps"] -= 1  # invariants are asked once before the first

    @invariant()
    def a_step_is_done(self) -> None:
        self.counted["steps"] += 1


#: What is said of every machine, also where it is nothing.
KINDS = ("sequences", "steps", "kills", "damages", "concurrent")


#: So many sequences at a time: in between it is looked at the clock.
AT_A_TIME = 10


def go_through(machine: type[Machine], sequences: int, steps: int, minutes: float = math.inf) -> dict[str, Any]:
    """Run a machine; what it has gone through without a disagreement, which would have ended it. It goes through so
    many sequences, or fewer if that takes longer than so many minutes."""
    machine.counted = Counter()
    began = time.monotonic()
    while (done := machine.counted["sequences"]) < sequences and time.monotonic() - began < 60 * minutes:
        settings = hypothesis.settings(
            max_examples=min(AT_A_TIME, sequences - done),
            stateful_step_count=steps,
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        run_state_machine_as_test(machine, settings=settings)
    assert machine.counted["sequences"] >= sequences or minutes < math.inf
    return {**dict.fromkeys(KINDS, 0), **machine.counted, "disagreements": 0}


@contextmanager
def quietly() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """A block whose output is kept, and not shown."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        yield out, err


# Damages


def flip(path: Path, place: float) -> None:
    """Change one bit of a file, at a share of its length."""
    content = bytearray(path.read_bytes())
    content[min(int(place * len(content)), len(content) - 1)] ^= 1 << int(place * 997) % 8
    path.write_bytes(bytes(content))


def truncate(path: Path, place: float) -> None:
    """Cut a file off at a share of its length."""
    os.truncate(path, int(place * path.stat().st_size))


def empty(path: Path, place: float) -> None:
    """Leave nothing in a file."""
    path.write_bytes(b"")


def remove(path: Path, place: float) -> None:
    """Remove a file."""
    path.unlink()


#: Damages to a file with content, by name.
DAMAGES: dict[str, Callable[[Path, float], None]] = {
    "a bit": flip,
    "cut off": truncate,
    "empty": empty,
    "removed": remove,
}
