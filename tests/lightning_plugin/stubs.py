"""Importing timm where torchvision is not installed.

timm's models need nothing of torchvision, but its modules name a few things of it when they are imported: a frozen
BatchNorm for `isinstance`, image transforms, datasets. While timm is imported, and only then, empty classes stand in
for these names. None of them is ever called by the networks that are tested.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Named(type):
    """A class with any attribute, for defaults such as ``InterpolationMode.BILINEAR``."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(f"{cls.__name__}.{name}")


def stand_in(name: str) -> type:
    def refuse(self: object, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"{name} stands in for a part of torchvision, which is not installed")

    return Named(name, (), {"__init__": refuse})


class StubModule(ModuleType):
    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = stand_in(name)
        setattr(self, name, value)
        return value


class Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.split(".")[0] != "torchvision":
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


@contextmanager
def timm_alone() -> Iterator[ModuleType]:
    """timm, imported with stand-ins where torchvision is missing; afterwards both are forgotten again."""
    if importlib.util.find_spec("torchvision") is not None:
        yield importlib.import_module("timm")
        return
    finder = Finder()
    sys.meta_path.append(finder)
    try:
        timm = importlib.import_module("timm")
        importlib.import_module("timm.models")
    finally:
        sys.meta_path.remove(finder)
    try:
        yield timm
    finally:
        for name in [n for n in sys.modules if n.split(".")[0] in ("timm", "torchvision")]:
            del sys.modules[name]
