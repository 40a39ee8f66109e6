"""Recipes kept in the user's cache: the next process begins with what this one has planned.

A file holds the recipes of one network, budget and machine (`key_of` says what they depend on). A file that cannot be
read is ignored, and written anew.
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
from lightning_plugin.planner.recipes.recipe import Recipe

log = logging.getLogger(__name__)

#: Files that are kept; of more, those that were not used for longest go.
MOST_FILES = 200


@once
def sources() -> str:
    """A digest of the engine's source: plans of one version of it are not used by another."""
    found = hashlib.sha256()
    root = Path(__file__).resolve().parents[2]
    for path in sorted(root.rglob("*.py")):
        found.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return found.hexdigest()


def key_of(*about: Any) -> str:
    """The name of a file of recipes: a digest of ``about`` (structure and weights of the network, budget, rates,
    options) and of the versions."""
    return hashlib.sha256(repr((sources(), torch.__version__, about)).encode()).hexdigest()[:24]


def place(key: str) -> Path | None:
    """The file of a key; None if nothing is to be kept."""
    kept = cache.folder()
    return None if kept is None else kept / "recipes" / f"{key}.json"


def load(key: str) -> list[Recipe]:
    """The recipes in the user's cache."""
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


def keep(key: str, recipes: Sequence[Recipe]) -> None:
    """Write recipes to the user's cache, if there is one."""
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
    }


def read(data: dict[str, Any]) -> Recipe:
    plan, image, references = Plan.from_json(data["plan"]), sizes(data["image"]), sizes(data["references"])
    if len(references) != len(plan.segments) or not all(all(r) for r in (image, *references)):
        raise ValueError("it is of no image")
    if type(data["positions"]) is not int or data["positions"] < 1:
        raise ValueError(f"it is for {data['positions']!r} positions")
    return Recipe(plan, image, references, data["positions"])


def sizes(thing: Any) -> Any:
    """Whole numbers, none of them negative, in lists within lists."""
    if not isinstance(thing, list):
        raise ValueError(f"{thing!r} is no list of sizes")
    return tuple(one if isinstance(one, int) and one >= 0 else sizes(one) for one in thing)
