"""What the user's code does, one level below autograd: the operators that a call runs on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.capture.alias import same_memory
from lightning_plugin.capture.session import Session
from lightning_plugin.private import TorchDispatchMode, schema
from lightning_plugin.trees import tree_leaves


@dataclass(frozen=True, eq=False)
class Seen:
    """One operator that ran on fake tensors."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any

    @property
    def outs(self) -> list[Tensor]:
        return [o for o in tree_leaves(self.out) if isinstance(o, Tensor)]


class Watch(TorchDispatchMode):
    """Notes the operators a function runs on fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Seen] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.calls.append(Seen(func, args, kwargs, out))
        return out


def watch(session: Session, func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Watch]:
    """The result of a call, and what it ran."""
    with session.faking(), torch.no_grad(), Watch() as seen:
        out = func(*args, **kwargs)
    return out, seen


def mutated(seen: Watch, fakes: Sequence[Tensor]) -> list[Tensor]:
    """The argument tensors that the call wrote to, itself or through views."""
    wrote = [t for c in seen.calls for t in written_by(c.func, c.args, c.kwargs)]
    return list({id(f): f for f in fakes if any(same_memory(f, t) for t in wrote)}.values())


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    found = schema(func)
    if found is None or not found.is_mutable:
        return
    for i, a in enumerate(found.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            t = args[i] if i < len(args) else kwargs.get(a.name)
            if isinstance(t, Tensor):
                yield t
