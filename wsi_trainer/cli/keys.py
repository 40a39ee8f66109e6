"""Checks the keys of a run's options before torch is imported: a typo is said within a second.

Groups of keys are fields of dataclasses and parameters of a constructor, which are read from their source text.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from wsi_trainer.errors import UserError

GROUPS = {
    "data": ("wsi_trainer/data/dataset.py", "DataConfig"),
    "train": ("wsi_trainer/fit/config.py", "TrainConfig"),
    "model": ("wsi_trainer/models/slide_model.py", "ModelConfig"),
}
"""Where each group's keys are written, and in which class."""


def check_keys(words: Sequence[str]) -> None:
    """Refuse a key of a group that the group does not have, on the command line or in a config file."""
    configs: list[str] = []
    for word, after in pairwise([*words, ""]):
        name, _, value = word.partition("=")
        if name == "--config":
            configs.append(value or after)
        group, _, key = name.removeprefix("--").partition(".")
        if name.startswith("--") and key and group in GROUPS:
            check(f"--{group}.", key.removesuffix("+"), group, "argument", "")
    for path in map(Path, configs):
        for group, key in keys_in(path):
            check(f"{group}.", key, group, "key", f" in {', '.join(configs)}")


def check(prefix: str, key: str, group: str, kind: str, where: str) -> None:
    """Refuse one key."""
    valid = keys_of_group(group)
    if key.partition(".")[0] in valid or key.endswith("help"):
        return
    from wsi_trainer.cli.parsing import suggest

    wrong = prefix + key
    raise UserError(f"unknown {kind} '{wrong}'{where}; {suggest(wrong, [prefix + one for one in valid])}")


def keys_in(path: Path) -> Iterator[tuple[str, str]]:
    """The groups and keys of a config file; nothing of one that cannot be read, which the parser will say."""
    import yaml

    from wsi_trainer.foreign import Unreadable, read_text
    from wsi_trainer.foreign.texts import check_text

    try:
        text = read_text(path)
        check_text(text)
        content = yaml.safe_load(text)
    except (OSError, ValueError, Unreadable, yaml.YAMLError):
        return
    for group in GROUPS:
        found = content.get(group) if isinstance(content, dict) else None
        yield from ((group, str(key)) for key in (found if isinstance(found, dict) else ()))


def keys_of_group(group: str) -> list[str]:
    """The keys of a group, in their order."""
    file, name = GROUPS[group]
    spec = find_spec("wsi_trainer")
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).parents[1].joinpath(file).read_text(encoding="utf-8"))
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    for node in found.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return [argument.arg for argument in (*node.args.args[1:], *node.args.kwonlyargs)]
    fields = (node.target for node in found.body if isinstance(node, ast.AnnAssign))
    return [field.id for field in fields if isinstance(field, ast.Name)]
