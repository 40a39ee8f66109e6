"""A rule written as ordinary PyTorch: a function whose operators have rules of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_plugin.graph import Value


def decompose(rec: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Record what ``function`` runs on values; its results, or `NotImplemented` where a step has no rule."""
    from lightning_plugin.record import lower, watch  # the recorder itself imports the rules
    from lightning_plugin.session import bind, bound

    def fake(a: Any) -> Any:
        if not isinstance(a, Value):
            return a
        if bound(a.fake) is not a:
            fresh = rec.fake(a.shape, a.dtype, a.device)
            bind(fresh, a)
            return fresh
        return a.fake

    is_value = lambda a: isinstance(a, Value)  # noqa: E731
    fakes, named = tree_map(fake, (args, kwargs), is_leaf=is_value)
    out, seen = watch(rec.session, function, fakes, named)
    if lower(rec, seen) is not None:
        return NotImplemented
    return tuple(bound(o) for o in tree_leaves(out) if isinstance(o, Tensor))
