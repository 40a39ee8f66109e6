"""The names ``"sft"`` and ``"sft_ddp"`` for ``Trainer(strategy=...)``.

Lightning has no entry point for strategies: they have to be registered by whoever defines them. Importing
Lightning takes seconds, so it is not imported for this; if it is not there yet, registration waits until
somebody imports it. `pytorch_lightning` and `lightning.pytorch` have registries of their own.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

#: The package that a user imports, and the module with our strategies for it.
FLAVOURS = {
    "pytorch_lightning": "lightning_plugin.strategy.flavour_pytorch_lightning",
    "lightning.pytorch": "lightning_plugin.strategy.flavour_lightning",
}


def register_all() -> None:
    """Register with every Lightning that is imported, and with any other once it is."""
    for package in FLAVOURS:
        if package in sys.modules:
            register(package)
    if not any(isinstance(finder, AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, AfterImport())


def register(package: str) -> None:
    """Register the strategies for one Lightning package, once."""
    strategies = importlib.import_module(FLAVOURS[package]).STRATEGIES
    registry = importlib.import_module(f"{package}.strategies").StrategyRegistry
    for name, (strategy, options) in strategies.items():
        if name not in registry:
            registry.register(name, strategy, description=(strategy.__doc__ or "").split("\n")[0], **options)


class AfterImport(importlib.abc.MetaPathFinder):
    """Registers as soon as a Lightning package was imported by anyone."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in FLAVOURS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = Registering(spec.loader, fullname)
        return spec


class Registering(importlib.abc.Loader):
    """A module's own loader, with registration after it."""

    def __init__(self, loader: Any, name: str) -> None:
        self.loader = loader
        self.name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.loader, attribute)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        register(self.name)
