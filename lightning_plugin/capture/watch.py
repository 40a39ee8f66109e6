"""The user's code while it is recorded: the modules that are calling, by the stack of Python; and the operators that a
call runs on fake tensors, one level below autograd."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_plugin.capture.alias import same_memory
from lightning_plugin.capture.session import Session
from lightning_plugin.private import TorchDispatchMode, custom_function, operator_name, schema, tree_leaves

#: The code of a module being called. Compared by identity: code made by torch.compile cannot be hashed.
_CALL = nn.Module._call_impl.__code__
_names = threading.local()


def calling() -> tuple[nn.Module | None, str]:
    """The innermost module that is being called, and its path from the outermost one that is; for plans and messages.
    Without any, none and nothing."""
    frame = sys._getframe(1)
    modules: list[nn.Module] = []
    while frame is not None:
        if frame.f_code is _CALL:
            modules.append(frame.f_locals["self"])
        frame = frame.f_back  # type: ignore[assignment]
    if not modules:
        return None, ""
    innermost = modules[0]
    if len(modules) > 1 and getattr(modules[-1], "wraps_only", False):
        modules.pop()  # the user's paths begin at the user's module
    root = modules[-1]
    cached = getattr(_names, "cache", None)
    if cached is None or cached[0] is not root:
        cached = _names.cache = root, {id(m): n for n, m in root.named_modules()}
    paths = cached[1]
    return innermost, next((paths[id(m)] for m in modules if id(m) in paths), type(innermost).__name__)


def forget_modules() -> None:
    """Drop the names of modules after a recording, so that no module is kept alive by them."""
    _names.cache = None


def label(func: Callable[..., Any]) -> str:
    """A call as messages name it: the function, and the module that calls it."""
    _, path = calling()
    return f"{name_of_call(func)} in '{path}'" if path else name_of_call(func)


def name_of_call(func: Callable[..., Any]) -> str:
    """A function as its user knows it."""
    return getattr(custom_function(func) or func, "__name__", str(func))


def copied(x: Tensor, new: Tensor, non_blocking: bool = False) -> Tensor:
    """Result of ``x.copy_(new)``."""
    return new.to(x.device, x.dtype).expand_as(x).clone()


#: Operators to be run on vectors in place of others: real vectors need not have the strides of their fakes, and a view
#: is particular about strides; the out-of-place copy has no derivative.
ON_VECTORS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
    torch.ops.aten.copy.default: copied,
}

#: In-place operators that overwrite a map with something of the same shape and type, whose backward needs the result
#: or nothing. They save memory where the user's code uses them, so they are run as the user wrote them.
IN_PLACE = {
    getattr(torch.ops.aten, name).default
    for name in (
        "relu_ leaky_relu_ elu_ celu_ hardtanh_ hardswish_ hardsigmoid_ silu_ mish_ sigmoid_ tanh_ threshold_ relu6_"
    ).split()
    if hasattr(getattr(torch.ops.aten, name, None), "default")
} | {torch.ops.aten.add_.Tensor, torch.ops.aten.mul_.Tensor, torch.ops.aten.sub_.Tensor, torch.ops.aten.div_.Tensor}


def functional(func: Any) -> Any:
    """The operator that computes what an in-place operator writes."""
    packet = getattr(torch.ops.aten, operator_name(func).removesuffix("_"), None)
    if schema(func).name == "aten::copy_":
        return torch.ops.aten.copy.default
    overload = schema(func).overload_name or "default"
    return getattr(packet, overload, None) if packet is not None else None


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
