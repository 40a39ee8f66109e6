"""The user's cache folder: rates and recipes that later processes begin with.

A file begins with a digest of the rest and is written as a whole or not at all. One that is not as it was written is
ignored, with a warning, and written anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache as once
from pathlib import Path
from typing import Any

import torch
from platformdirs import user_cache_path

from lightning_plugin.plan import Plan
from lightning_plugin.planner.recipe import Recipe

log = logging.getLogger(__name__)

#: Names another folder; where it is set and empty, nothing is kept.
VARIABLE = "LIGHTNING_PLUGIN_CACHE"
#: Files of recipes that are kept; of more, those that were not used for longest go, half written ones too.
MOST_FILES = 200


def file_of(name: str) -> Path | None:
    """A file of the user's cache; None if nothing is to be kept."""
    given = os.environ.get(VARIABLE)
    if given is None:
        return user_cache_path("lightning_plugin", appauthor=False) / name
    return Path(given) / name if given else None


def read(path: Path) -> Any:
    """The content of a file.

    Raises:
        ValueError, OSError: It is not as it was written, or cannot be read.
    """
    digest, _, text = path.read_text(encoding="utf-8").partition("\n")
    if digest != digest_of(text):
        raise ValueError("it is not what was written")
    return json.loads(text)


def write(path: Path, content: Any) -> None:
    """Write a file as a whole or not at all."""
    text = json.dumps(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        name = Path(file.name)
        try:
            file.write(f"{digest_of(text)}\n{text}")
            file.close()
            os.replace(name, path)
        except BaseException:
            name.unlink(missing_ok=True)
            raise


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# Recipes ----------------------------------------------------------------------------------------------------


@once
def sources() -> str:
    """A digest of the engine's source: plans of one version of it are not used by another."""
    found = hashlib.sha256()
    root = Path(__file__).resolve().parents[1]
    for path in sorted(root.rglob("*.py")):
        found.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return found.hexdigest()


def key_of(*about: Any) -> str:
    """The name of the recipes for a network, budget and machine: a digest of ``about`` (structure and weights of the
    network, budget, rates, options) and of the versions."""
    return digest_of(repr((sources(), torch.__version__, about)))[:24]


def load(key: str) -> list[Recipe]:
    """The recipes in the user's cache."""
    path = file_of(f"recipes/{key}.json")
    if path is None or not path.is_file():
        return []
    try:
        content = read(path)
        with suppress(OSError):  # a folder that may only be read is of use, too
            path.touch()
        return [Recipe(Plan.from_json(plan), *map(tuples, about)) for plan, *about in content]
    except (OSError, ValueError) as error:
        log.warning("%s is ignored (%s): plans are searched for again", path, error)
        return []


def keep(key: str, recipes: Sequence[Recipe]) -> None:
    """Write recipes to the user's cache, if there is one."""
    path = file_of(f"recipes/{key}.json")
    if path is None:
        return
    try:
        write(path, [(r.plan.to_json(), r.image, r.references, r.positions) for r in recipes])
        for old in sorted(path.parent.iterdir(), key=written_at, reverse=True)[MOST_FILES:]:
            old.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be written (%s): the next process plans again", path, error)


def written_at(path: Path) -> float:
    """The time at which a file was written; long ago, if another process has removed it meanwhile."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def tuples(content: Any) -> Any:
    """Tuples in place of JSON's lists."""
    return tuple(map(tuples, content)) if isinstance(content, list) else content
