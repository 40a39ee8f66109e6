"""The tensors and numbers inside lists, tuples and dictionaries: PyTorch's own trees, faster where they are plain.

A recording looks through the arguments of every call several times, and nearly all are tuples of tensors and numbers.
Whatever else there is (a dataclass that somebody has registered, a named tuple) is PyTorch's affair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_plugin import private


def tree_map(change: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """The tree with each leaf changed."""
    kind = type(tree)
    if private.never_a_node(kind) or (is_leaf is not None and is_leaf(tree)):
        return change(tree)
    if kind is tuple:
        return tuple([tree_map(change, t, is_leaf) for t in tree])
    if kind is list:
        return [tree_map(change, t, is_leaf) for t in tree]
    if kind is dict:
        return {key: tree_map(change, t, is_leaf) for key, t in tree.items()}
    return private.tree_map(change, tree, is_leaf=is_leaf)


def tree_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """The leaves of a tree, in order."""
    found: list[Any] = []
    gather(tree, is_leaf, found)
    return found


def gather(tree: Any, is_leaf: Callable[[Any], bool] | None, found: list[Any]) -> None:
    kind = type(tree)
    if private.never_a_node(kind) or (is_leaf is not None and is_leaf(tree)):
        found.append(tree)
    elif kind is tuple or kind is list:
        for t in tree:
            gather(t, is_leaf, found)
    elif kind is dict:
        for t in tree.values():
            gather(t, is_leaf, found)
    else:
        found += private.tree_leaves(tree, is_leaf=is_leaf)
