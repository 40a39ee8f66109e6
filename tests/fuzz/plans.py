"""The engine's plans, and the recipes that it keeps in the user's cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_plugin import Plan, TiledModule
from lightning_plugin.errors import PlanError
from lightning_plugin.planner import cache
from lightning_plugin.planner.recipes import shelf
from tests.fuzz.kinds import Target, Unjudged
from tests.fuzz.mutations import BINARY, TEXT, words


def planned(folder: Path) -> Plan:
    """The plan of a step, which leaves its recipe in the folder."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1)]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cache.VARIABLE, str(folder))
        tiled = TiledModule(network, budget="2MiB")
        tiled(torch.zeros(1, 3, 200, 210)).sum().backward()
    assert tiled.plan is not None
    return tiled.plan


def plans(folder: Path) -> Sequence[Path]:
    (folder / "plan.json").write_text(planned(folder / "cache").to_json())
    return [folder / "plan.json"]


def read_plan(path: Path) -> Any:
    return json.loads(Plan.from_json(path.read_text(encoding="utf-8", errors="replace")).to_json())


def plan_truth(path: Path) -> Any:
    """The text's own values: a plan that is taken says what the text says, key by key, and nothing else."""
    try:
        said = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        made = json.loads(Plan.from_json(path.read_text(encoding="utf-8", errors="replace")).to_json())
    except Exception as error:
        raise Unjudged from error
    if said.get("version", 1) != made["version"]:
        raise Unjudged  # of an older form, which is another text
    return filled(said, made)


def filled(said: Any, made: Any) -> Any:
    """The text with the defaults of keys that it leaves out."""
    if isinstance(said, dict) and isinstance(made, dict):
        return {**made, **{key: filled(value, made.get(key)) for key, value in said.items()}}
    if isinstance(said, list) and isinstance(made, list) and len(said) == len(made):
        return [filled(one, other) for one, other in zip(said, made)]
    return said


def recipes(folder: Path) -> Sequence[Path]:
    planned(folder)
    found = sorted((folder / "recipes").glob("*.json"))
    assert found, "the step left a recipe"
    return found


def read_recipes(path: Path) -> Any:
    """Recipes as they were; a file that cannot be read is ignored with a warning, which is said as an error here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cache.VARIABLE, str(path.parents[1]))
        found = shelf.load(path.stem)
    if not found:
        raise PlanError(f"{path.stem} is ignored")
    return [unfolded(shelf.written(recipe)) for recipe in found]


def unfolded(recipe: Any) -> Any:
    """A recipe whose plan is no text, in which empty space says nothing."""
    return {**recipe, "plan": json.loads(recipe["plan"])}


def recipe_truth(path: Path) -> Any:
    """What a checksum vouches for, as JSON; else nothing."""
    digest, _, text = path.read_bytes().partition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != digest:
        return "nothing"
    return [unfolded(recipe) for recipe in json.loads(text)]


def sealed(path: Path) -> None:
    """The checksum of what is there now."""
    _, _, text = path.read_bytes().partition(b"\n")
    path.write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)


TARGETS = (
    Target("plan", plans, read_plan, plan_truth, TEXT, named="plan"),
    Target("recipes", recipes, read_recipes, recipe_truth, (*BINARY, *TEXT)),
    Target("recipes, sealed again", recipes, read_recipes, recipe_truth, (words,), after=sealed),
)
