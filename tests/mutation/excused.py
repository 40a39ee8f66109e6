"""Mutants that no test can be asked to notice, and why: `excused.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from tests.mutation.places import ENGINE

TABLE = Path(__file__).with_name("excused.toml")


@cache
def table() -> Mapping[str, list[dict[str, str]]]:
    return tomllib.loads(TABLE.read_text())


def why(file: str, before: str, after: str) -> str | None:
    """The reason, if there is one: for a change wherever it is made, for a line, or for one change of it."""
    for entry in table().get("anywhere", ()):
        if _is_one(before, after, entry["before"], entry["after"]):
            return entry["why"]
    for entry in table().get("line", ()):
        here = file == f"{ENGINE}/{entry['file']}" and before == entry["before"]
        if here and entry.get("after", after) == after:
            return entry["why"]
    return None


def _is_one(before: str, after: str, old: str, new: str) -> bool:
    """Whether one text became the other by one replacement."""
    at = before.find(old)
    while at >= 0:
        if before[:at] + new + before[at + len(old) :] == after:
            return True
        at = before.find(old, at + 1)
    return False
