"""The conda recipe, the citation and the changelog say what pyproject.toml and the package say."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

import wsi_trainer

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RECIPE = yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text())
#: Packages that have other names at conda-forge, and versions of its own there.
NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base", "openslide-bin": "openslide"}


def parted(requirement: str) -> tuple[str, str]:
    """Name and versions of a requirement, without extras."""
    name, versions = re.fullmatch(r"([\w.-]+)(?:\[[^]]*\])?\s*(.*)", requirement).groups()  # type: ignore[union-attr]
    return name, versions


def test_the_recipe_requires_what_the_project_does() -> None:
    run = dict(parted(one) for one in RECIPE["requirements"]["run"])
    for requirement in PROJECT["dependencies"]:
        name, versions = parted(requirement)
        there = run.pop(NAMES.get(name, name))
        assert there == versions or name == "openslide-bin", requirement
    assert set(run) == {"python", "ruamel.yaml", "docstring_parser", "typeshed-client"}
    assert RECIPE["about"]["summary"] == PROJECT["description"]
    assert RECIPE["build"]["python"]["entry_points"] == [f"wsi-train = {PROJECT['scripts']['wsi-train']}"]


def test_one_version_is_named_everywhere() -> None:
    version = wsi_trainer.__version__
    assert RECIPE["context"]["version"] == version
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert re.search(rf"^## {re.escape(version)} ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
