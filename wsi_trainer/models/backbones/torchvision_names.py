"""Importing timm where torchvision is not installed.

timm's networks need nothing of torchvision, but some of its files name a few things of it when they are imported: a
frozen BatchNorm to ask `isinstance` about, transforms of images, data sets. While timm is imported, and only then,
empty classes stand in for these names. Whoever calls one of them hears that torchvision is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, MutableSequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

PACKAGE = "torchvision"


class _Named(type):
    """A class that has any attribute, for defaults such as `InterpolationMode.BILINEAR`."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(f"{cls.__name__}.{name}")


def _stand_in(name: str) -> type:
    def refuse(self: object, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"{name} is a part of {PACKAGE}, which is not installed")

    return _Named(name, (), {"__init__": refuse})


class _Module(ModuleType):
    __path__: MutableSequence[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _stand_in(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] == PACKAGE else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


@contextmanager
def torchvision_names() -> Iterator[None]:
    """Let torchvision be named while something is imported, without it; afterwards it is as absent as before."""
    if PACKAGE in sys.modules or find_spec(PACKAGE) is not None:
        yield
        return
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
            del sys.modules[name]
