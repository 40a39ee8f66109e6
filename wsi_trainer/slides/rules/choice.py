"""Which rules a user asks for, and with which parameters."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from wsi_trainer.errors import UserError
from wsi_trainer.slides.rules.look import Rule
from wsi_trainer.slides.rules.table import ROWS, Row

GROUPS = {
    "none": (),
    "usual": tuple(row.name for row in ROWS if row.usual),
    "all": tuple(row.name for row in ROWS),
}
"""Words for several rules."""


@dataclass(frozen=True)
class Rules:
    """The rules that were asked for, in the order of the table. Equal ones give equal masks."""

    chosen: tuple[Rule, ...] = ()

    @classmethod
    def of(cls, words: str, *each: Rule) -> Rules:
        """The rules of a comma-separated list.

        Args:
            words: Names of rules, or none, usual or all.
            each: All rules there are; those with parameters of their own have to be asked for.
        """
        parameters = {rule.name: rule for rule in each}
        names = GROUPS.get(words.strip()) or _names(words)
        for row in ROWS:
            if row.name not in names and parameters[row.name] != row.kind():
                raise UserError(f"--{row.name}.* is given, and the rule is not; add it: --rules {words},{row.name}")
        return cls(tuple(parameters[row.name] for row in ROWS if row.name in names))

    @property
    def finest(self) -> float:
        """Micrometres along a pixel of the finest copy of a slide that a rule asks for."""
        return min([getattr(rule, "mpp", math.inf) for rule in self.chosen], default=math.inf)

    def rows(self) -> list[tuple[Row, Rule]]:
        """Each rule beside its row."""
        rows = {row.name: row for row in ROWS}
        return [(rows[rule.name], rule) for rule in self.chosen]

    def record(self) -> dict[str, Any]:
        """What is kept in a store: all that decides the mask."""
        return {row.name: {"version": row.version, **asdict(rule)} for row, rule in self.rows()}  # type: ignore[call-overload]


def _names(words: str) -> tuple[str, ...]:
    names = [word.strip() for word in words.split(",") if word.strip() not in ("", "none")]
    known = [row.name for row in ROWS]
    for name in names:
        if name not in known:
            raise UserError(f"--rules {words}: {name!r} is no rule; there are {', '.join(known)}, usual, all and none")
    return tuple(names)
