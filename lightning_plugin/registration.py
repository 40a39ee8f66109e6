"""Names of the strategies for ``Trainer(strategy=...)``: registered with each Lightning that the program imports.

Lightning takes seconds to import and the engine does not need it, so that this package does not import it. If Lightning
is imported later, its registry gets the names as soon as it exists. What is registered is a function, which imports the
strategies when a Trainer asks for one: by then Lightning is whole.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: Registered names: the strategy class of each, and its preset options.
NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("SFTStrategy", {}),
    "sft_ddp": ("SFTDDPStrategy", {}),
    "sft_ddp_spawn": ("SFTDDPStrategy", {"start_method": "spawn"}),
    "sft_ddp_fork": ("SFTDDPStrategy", {"start_method": "fork"}),
    "sft_ddp_notebook": ("SFTDDPStrategy", {"start_method": "fork"}),
}

#: Modules of Lightning's distributions that have a registry.
REGISTRIES = ("pytorch_lightning.strategies", "lightning.pytorch.strategies")


class LightningFinder(MetaPathFinder):
    """Finder that lets others find Lightning, and has the names registered after it is loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in REGISTRIES:
            return None
        others = (f for f in sys.meta_path if not isinstance(f, LightningFinder) and hasattr(f, "find_spec"))
        spec = next((s for f in others if (s := f.find_spec(name, path, target)) is not None), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            load = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                if module.__name__ == name:  # the loader of a zip file loads others too
                    register(module)

            loader.exec_module = exec_module
        return spec


def register(module: ModuleType) -> None:
    """Register the names in the registry of a module of Lightning."""
    for name, (strategy, options) in NAMES.items():
        make = partial(make_strategy, strategy, module.Strategy)
        description = f"{strategy} of lightning_plugin"
        module.StrategyRegistry.register(name, make, description, override=True, **options)


def make_strategy(name: str, base: type, **options: Any) -> Any:
    """Make a strategy for a Trainer of the Lightning with this base class."""
    strategy = getattr(import_module("lightning_plugin.strategy"), name)
    if not issubclass(strategy, base):
        theirs, ours = base.__module__, import_module("lightning_plugin.strategy.bases").PACKAGE
        raise TypeError(
            f"this Trainer is of {theirs.removesuffix('.strategies.strategy')}, and the strategies of this program are "
            f"for {ours}: import one of the two, or the Trainer's before lightning_plugin.strategy"
        )
    return strategy(**options)


def install_names() -> None:
    """Register the names with each Lightning that is imported, now or later; called once, by the package."""
    sys.meta_path.insert(0, LightningFinder())
    for name in REGISTRIES:
        if hasattr(module := sys.modules.get(name), "StrategyRegistry"):
            register(module)  # type: ignore[arg-type]
