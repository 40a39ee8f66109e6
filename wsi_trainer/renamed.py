"""Keys of configs and of checkpoints that earlier versions wrote, read under their present names."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

KEYS = {
    "model.levels": "magnifications",
    "model.share_levels": "share_backbone",
    "model.trained": "finetune",
    "model.statistics": "batchnorm_over",
    "model.task.beside": "auxiliary",
    "model.task.beside_weight": "auxiliary_weight",
    "model.task.init_args.beside": "auxiliary",
    "model.task.init_args.beside_weight": "auxiliary_weight",
    "data.context": "extra_downsamples",
    "data.turn": "flip_rotate",
    "data.patches.turn": "flip_rotate",
    "train.splits": "split_grid",
    "train.wobble": "split_jitter",
}
"""The last part of the present name of each former key."""
PARTS = {"beside.": "auxiliary.", "task.beside.": "task.auxiliary."}
"""Beginnings of the names of weights in a checkpoint."""


def present_key(key: str) -> str:
    """The present name of a key, which may go on behind a former one: `model.task.beside.classes`."""
    for old, new in KEYS.items():
        if key == old or key.startswith(f"{old}."):
            return f"{old.rpartition('.')[0]}.{new}{key[len(old) :]}"
    return key


def present_keys(content: Any, path: str = "", told: dict[str, str] | None = None) -> Any:
    """A config, or the part of one at a path, with present keys.

    Args:
        content: What was read.
        path: The keys that lead to it, with a dot at the end.
        told: Is given the former keys that were found, with their present names.
    """
    if not isinstance(content, Mapping):
        return content
    found = {}
    for key, value in content.items():
        written = f"{path}{key}"
        name = present_key(written)
        if name != written:
            key = name.removeprefix(path)
            if told is not None:
                told[written] = name
        found[key] = present_keys(value, f"{name}.", told)
    return found


def tell(told: Mapping[str, str]) -> None:
    """Print which former keys were read."""
    if told:
        listed = ", ".join(f"{old} is now {new.rpartition('.')[2]}" for old, new in told.items())
        print(f"wsi-train: keys of an earlier version: {listed}", file=sys.stderr)


def present_weights(state: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of a checkpoint under their present names."""

    def present(name: str, parts: Iterable[str] = PARTS) -> str:
        old = next((part for part in parts if name.startswith(part)), "")
        return PARTS.get(old, "") + name.removeprefix(old)

    return {present(name): value for name, value in state.items()}
