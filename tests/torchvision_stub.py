"""Imports timm and segmentation-models-pytorch where torchvision cannot be imported.

Both import torchvision, whose wheel on PyPI is built for CUDA's torch and cannot be imported beside the CPU's. The
networks that are tested use nothing of it. While the two are imported, and only then, empty classes stand in for its
names.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

PACKAGES = ("timm", "timm.models", "segmentation_models_pytorch")


class _Named(type):
    """A class with any attribute, for defaults such as `InterpolationMode.BILINEAR`."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(f"{cls.__name__}.{name}")


def _stand_in(name: str) -> type:
    def refuse(self: object, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"{name} stands in for a part of torchvision, which is not installed")

    return _Named(name, (), {"__init__": refuse})


class _Module(ModuleType):
    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _stand_in(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def import_networks(names: Sequence[str] = PACKAGES) -> None:
    """Import those of the packages that are installed; torchvision is as absent afterwards as before."""
    packages = [name for name in names if find_spec(name.split(".")[0]) is not None]
    stubbed = find_spec("torchvision") is None
    finder = _Finder()
    if stubbed:
        sys.meta_path.append(finder)
    try:
        for name in packages:
            importlib.import_module(name)
    finally:
        if stubbed:
            sys.meta_path.remove(finder)
            for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
                del sys.modules[name]


import_networks()
