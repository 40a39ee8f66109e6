"""One faulty run, what it has to come to, and many of them.

A faulty run *survives* if it ends in the right result at once; or if it ends with a message of one line that names the
file or the cause, and the same command, given again without a fault, ends in the right result. The right result is that
of a run that never failed, file by file (`judge`). It must end: with nothing left over, no process and no temporary
file; and never with exit code 0 and another result.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.commands import COMMANDS, Command, bring
from tests.faults.judge import difference, tree
from tests.faults.kinds import HANGS, KINDS, READ_ONLY, Kind
from tests.faults.runs import Ended, Server
from tests.faults.seam import Site

RIGHT, RECOVERED, DEFECT, BEYOND = "right", "recovered", "defect", "beyond"
NAMED = "results cannot be written"
CAUSES = re.compile(
    r"memory|unable to allocate|no space left|disk|input/output|interrupted|too many open files|"
    r"temporarily unavailable|thread|process|lock|read-only|end(ed)? early|damaged|missing image|another run|"
    r"Jpeg2kError",  # of a codec that says no more
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Outcome:
    """How a faulty run has ended, after ``calls`` calls of its kind."""

    verdict: str
    why: str
    struck: str
    said: str
    calls: int


def kinds_of(name: str) -> dict[str, Kind]:
    """The faults of a command."""
    return {**KINDS, NAMED: READ_ONLY} | ({"hang while reading": HANGS} if COMMANDS[name].processes else {})


class Bench:
    """Runs of commands with faults."""

    def __init__(self, server: Server) -> None:
        self.server, self.place = server, server.place
        self._right: dict[str, dict[str, str]] = {}
        self._sites: dict[str, list[Site]] = {}

    def right(self, name: str) -> dict[str, str]:
        """What a command leaves that never failed."""
        if name not in self._right:
            command = COMMANDS[name]
            bring(self.server, command.before)
            listed = self.place.base / "calls"
            listed.write_text("")
            self.server.seam.arm((), "through", list_in=str(listed))
            ended = self.server.run(self._words(command), faulty=True)
            self._sites[name] = self.server.seam.sites(listed)
            if ended.code:
                raise RuntimeError(f"{name} fails without a fault: {ended.said[-3000:]}")
            self._right[name] = tree(self.place.now)
        return self._right[name]

    def sites(self, name: str, kind: Kind) -> list[Site]:
        """The site of each call that a kind of fault is about, in the order in which a command makes them."""
        return [site for site in self._sites[name] if site.call in kind.calls] if self.right(name) else []

    def try_one(self, name: str, kind_name: str, n: int) -> Outcome:
        """The n-th call of a kind fails."""
        command, kind = COMMANDS[name], kinds_of(name)[kind_name]
        expected = self.right(name)
        bring(self.server, command.before)
        self._arm(command, kind, n, kind.action)
        ended = self._two(command) if kind.action == "pause" else [self.server.run(self._words(command), faulty=True)]
        seam = self.server.seam
        struck, calls, fired = seam.struck(), int(seam.setting.count), int(seam.setting.fired)
        said = "\n-- and\n".join(one.said for one in ended)

        def outcome(verdict: str, why: str = "") -> Outcome:
            return Outcome(verdict, why, struck, said[-2500:], calls)

        why = next((found for one in ended if (found := self.unclear(one, kind))), "")
        if why:
            return outcome(DEFECT, why)
        if all(one.code == 0 for one in ended):
            wrong = difference(expected, tree(self.place.now), command.free)
            if wrong:
                return outcome(DEFECT, f"success, but {wrong}")
            return outcome(RIGHT if fired else BEYOND)
        if not fired:
            return outcome(DEFECT, f"without a fault, exit code {ended[0].code}")
        seam.arm((), "through")
        again = self.server.run((command.again or command.words)(str(self.place.now)))
        said += f"\n-- again\n{again.said}"
        why = self.unclear(again, kind)
        if again.code is None or "Traceback" in again.said:
            return outcome(DEFECT, f"run again: {why}")
        wrong = difference(expected, tree(self.place.now), command.free)
        if wrong:
            return outcome(DEFECT, f"run again: exit code {again.code}, {wrong}")
        return outcome(RECOVERED)

    def _arm(self, command: Command, kind: Kind, n: int, action: str) -> None:
        below = str(self.place.now / command.out) if kind is READ_ONLY else ""
        self.server.seam.arm(kind.calls, action, kind.value, first=n, times=kind.times, below=below)

    def _words(self, command: Command) -> list[str]:
        return command.words(str(self.place.now))

    def _two(self, command: Command) -> list[Ended]:
        """A run that stands still at its n-th call until another one on the same results is over."""
        setting = self.server.seam.setting
        first = self.server.begin(self._words(command), faulty=True)
        while not setting.fired and not Path(f"/proc/{first[0]}/stat").read_text().rpartition(")")[2].startswith(" Z"):
            time.sleep(0.005)
        second = self.server.begin(self._words(command))
        others = self.server.end(second)
        setting.value = 0
        ended = self.server.end(first)
        self.server.seam.disarm()
        return [ended, others]

    def unclear(self, ended: Ended, kind: Kind) -> str:
        """What is wrong with how a run has ended, whatever its result is."""
        if ended.code is None:
            return "it hangs"
        if ended.left:
            return "processes are left behind"
        if "Traceback (most recent call last)" in ended.said:
            return "a raw traceback"
        if ended.code == 0:
            return ""
        if ended.code < 0:
            return "" if kind.ends else f"it dies of signal {-ended.code}"
        if kind.ends and ended.code in (130, 143):
            return ""
        if "This is a fault" in ended.said:
            return "it takes the fault for one of its own"
        lines = [line for line in ended.said.splitlines() if re.search("error|failed|damaged|FAIL", line)]
        if not lines:
            return f"exit code {ended.code} without a message"
        causes = {os.strerror(kind.value).lower()} if kind.action == "error" else set()
        if not any(
            str(self.place.now) in line or CAUSES.search(line) or any(c in line.lower() for c in causes)
            for line in lines
        ):
            return "the message names neither the file nor the cause"
        return ""


def order(name: str, kind: str, sites: Sequence[Site]) -> list[int]:
    """All n of a kind: the first call of each site, then the last of each, then the others. Each of these in an order
    that is shuffled and the same each time, so that early stops leave a sample."""
    first: dict[Site, int] = {}
    last: dict[Site, int] = {}
    for n, site in enumerate(sites, 1):
        first.setdefault(site, n)
        last[site] = n
    found: list[int] = []
    for numbers in (list(first.values()), list(last.values()), list(range(1, len(sites) + 1))):
        random.Random(f"{name} {kind}").shuffle(numbers)
        found += numbers
    return list(dict.fromkeys(found))
