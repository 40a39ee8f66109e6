"""The module that is calling, by the path that plans and messages name."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_plugin.private import custom_function

#: The code of a module being called. Compared by identity: code made by torch.compile cannot be hashed.
_CALL = nn.Module._call_impl.__code__
_names = threading.local()


def module_path() -> str:
    """The path, from the outermost module that is being called, of the innermost one; read off the Python stack."""
    frame = sys._getframe(1)
    modules: list[nn.Module] = []
    while frame is not None:
        if frame.f_code is _CALL:
            modules.append(frame.f_locals["self"])
        frame = frame.f_back  # type: ignore[assignment]
    if not modules:
        return ""
    if len(modules) > 1 and getattr(modules[-1], "wraps_only", False):
        modules.pop()  # the user's paths begin at the user's module
    root = modules[-1]
    cached = getattr(_names, "cache", None)
    if cached is None or cached[0] is not root:
        cached = (root, {id(m): n for n, m in root.named_modules()})
        _names.cache = cached
    for module in modules:
        if id(module) in cached[1]:
            return cached[1][id(module)]
    return type(modules[0]).__name__


def innermost_module() -> nn.Module | None:
    """The innermost module that is being called."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            return frame.f_locals["self"]  # type: ignore[no-any-return]
        frame = frame.f_back  # type: ignore[assignment]
    return None


def in_train_mode() -> bool:
    """True if the innermost module that is being called is in train mode; where no module is, nothing says so."""
    module = innermost_module()
    return module is not None and module.training


def label(func: Callable[..., Any]) -> str:
    """A call as messages name it: the function, and the module that calls it."""
    path = module_path()
    return f"{name_of_call(func)} in '{path}'" if path else name_of_call(func)


def name_of_call(func: Callable[..., Any]) -> str:
    """A function as its user knows it."""
    return getattr(custom_function(func) or func, "__name__", str(func))


@contextmanager
def forget_modules() -> Iterator[None]:
    """Drop the cached names after a recording, so that no module is kept alive by them."""
    try:
        yield
    finally:
        _names.cache = None
