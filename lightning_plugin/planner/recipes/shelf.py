"""Recipes kept in the user's cache: the next process begins with what this one has planned.

A file holds the recipes of one network, budget and machine (`key_of` says what they depend on). It holds what was
rehearsed, not the formulas: those are made of it again. A file that cannot be read is ignored, and written anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import cache as once
from pathlib import Path
from typing import Any

import torch

from lightning_plugin.errors import PlanError
from lightning_plugin.plan import Plan
from lightning_plugin.planner import cache
from lightning_plugin.planner.recipes.recipe import Recipe, Rehearsed
from lightning_plugin.planner.recipes.size import Size, Traits
from lightning_plugin.planner.rehearsal.account import READ
from lightning_plugin.stretch import Note

log = logging.getLogger(__name__)

#: So many files are kept; of more, those that were not used for longest go.
MOST_FILES = 200


@once
def sources() -> str:
    """What tells this engine from another version of it: what was planned by one says nothing of another."""
    found = hashlib.sha256()
    root = Path(__file__).resolve().parents[2]
    for path in sorted(root.rglob("*.py")):
        found.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return found.hexdigest()


def key_of(*about: Any) -> str:
    """What recipes depend on, in a name: ``about`` are structure and weights of the network, budget, rates, options."""
    return hashlib.sha256(repr((sources(), torch.__version__, about)).encode()).hexdigest()[:24]


def place(key: str) -> Path | None:
    kept = cache.folder()
    return None if kept is None else kept / "recipes" / f"{key}.json"


def load(key: str) -> list[Recipe]:
    """The recipes that were kept."""
    path = place(key)
    if path is None or not path.is_file():
        return []
    try:
        digest, text = cache.read(path).split("\n", 1)
        if digest != digest_of(text):
            raise ValueError("it is not what was written")
        with suppress(OSError):  # a folder that may only be read is of use, too
            path.touch()
        return [read(data) for data in json.loads(text)]
    except (*cache.DAMAGED, PlanError) as error:
        log.warning("%s is ignored (%s): plans are searched for again", path, error)
        return []


def due(before: int, now: int) -> bool:
    """Whether recipes that have been taught so many sizes are to be kept: when an eighth of them is new, since all are
    written. A process that dies costs the next one no more than what it had learned since."""
    step = 1 << max(0, now.bit_length() - 4)
    return now // step > before // step


def keep(key: str, recipes: Sequence[Recipe]) -> None:
    """Keep recipes, where there is a place for them."""
    path = place(key)
    if path is None:
        return
    try:
        text = json.dumps([written(recipe) for recipe in recipes])
        cache.write(path, f"{digest_of(text)}\n{text}")
        files = sorted(path.parent.glob("*.json"), key=cache.written_at, reverse=True)
        for old in files[MOST_FILES:]:
            old.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be written (%s): the next process plans again", path, error)


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def written(recipe: Recipe) -> dict[str, Any]:
    return {
        "plan": recipe.plan.to_json(),
        "image": recipe.image,
        "references": recipe.references,
        "positions": recipe.positions,
        "rehearsed": [{**one.size.__dict__, "notes": one.notes} for one in recipe.rehearsed],
    }


def read(data: dict[str, Any]) -> Recipe:
    rehearsed = [Rehearsed(size(one), tuple(map(note, one["notes"]))) for one in data["rehearsed"]]
    plan, image, references = Plan.from_json(data["plan"]), sizes(data["image"]), sizes(data["references"])
    if len(references) != len(plan.segments) or not all(all(r) for r in (image, *references)):
        raise ValueError("it is of no image")
    if any(len(part) != len(plan.segments) for r in rehearsed for part in (r.size.traits, r.size.tiles)):
        raise ValueError("it is of another plan")
    if any(len(grids) != 2 for r in rehearsed for grids in r.size.tiles):
        raise ValueError("a segment has a grid for forward and one for backward")
    if any(not 0 <= place < len(plan.segments) for r in rehearsed for c in r.chapters for place, _ in c.turns):
        raise ValueError("a note is of no segment")
    if type(data["positions"]) is not int or data["positions"] < 1:
        raise ValueError(f"it is for {data['positions']!r} positions")
    return Recipe(plan, image, references, data["positions"], rehearsed)


def size(data: dict[str, Any]) -> Size:
    traits = tuple(Traits(*map(sizes, one)) for one in data["traits"])
    return Size(sizes(data["image"]), sizes(data["values"]), traits, sizes(data["tiles"]))


def note(data: list[Any]) -> Note:
    what, size, *who = data
    if not isinstance(what, str) or what not in READ or type(size) is not int:
        raise ValueError(f"{data!r} is not what a rehearsal notes")
    return Note(what, size, *map(named, who))


def named(thing: Any) -> Any:
    """Whose a note is: names and numbers, in lists within lists."""
    if isinstance(thing, dict):
        raise ValueError(f"{thing!r} names nothing")
    return tuple(map(named, thing)) if isinstance(thing, list) else thing


def sizes(thing: Any) -> Any:
    """Whole numbers, none of them negative, in lists within lists."""
    if not isinstance(thing, list):
        raise ValueError(f"{thing!r} is no list of sizes")
    return tuple(one if isinstance(one, int) and one >= 0 else sizes(one) for one in thing)
