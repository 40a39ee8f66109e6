"""A network by name, for planning: made without memory for its parameters where it can be."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from lightning_plugin import BudgetError
from wsi_trainer import models
from wsi_trainer.errors import UserError
from wsi_trainer.models import Backbone, SlideClassifier
from wsi_trainer.models.backbones import import_timm

T = TypeVar("T")


def build_model(name: str) -> Callable[[], nn.Module]:
    """What makes the network that `name` means: a backbone, `timm:NAME`, or `package.module:callable`."""
    if name.startswith("timm:"):
        return timm_model(name.removeprefix("timm:"))
    if ":" in name:
        return imported(*name.rsplit(":", 1))
    return backbone(name)


def on_any_device(build: Callable[[], nn.Module], use: Callable[[nn.Module], T]) -> T:
    """Use a network whose parameters are on the meta device, or, if it cannot live there, one with real parameters."""
    try:
        with torch.device("meta"):
            module = build()
        return use(module)
    except (BudgetError, ValueError, UserError):
        raise  # would be the same on any device
    except (RuntimeError, NotImplementedError):  # something reads the values of a parameter or a buffer
        return use(build())


def backbone(name: str) -> Callable[[], nn.Module]:
    """A slide classifier with one of the application's backbones."""
    known = {n: cls for n, cls in vars(models).items() if isinstance(cls, type) and issubclass(cls, Backbone)}
    known.pop("Backbone")
    found = {n.lower(): cls for n, cls in known.items()}.get(name.lower())
    if found is None:
        raise UserError(
            f"--model: there is no backbone '{name}'; valid: {', '.join(sorted(known))}, timm:NAME, "
            "package.module:callable"
        )
    make: Callable[[], nn.Module] = found
    return lambda: SlideClassifier(backbone=make())


def timm_model(name: str) -> Callable[[], nn.Module]:
    """A network of timm with its own head and no pretrained weights."""
    try:
        timm = import_timm()
    except UserError as error:
        raise UserError(f"--model: timm:{name} needs timm, which cannot be imported: {error}") from error
    known = timm.list_models()
    if name not in known and not timm.is_model(name):
        near = get_close_matches(name, known, n=3)
        raise UserError(f"--model: timm has no '{name}'" + (f"; did you mean {' or '.join(near)}?" if near else ""))
    return lambda: timm.create_model(name, pretrained=False)


def imported(module_name: str, attribute: str) -> Callable[[], nn.Module]:
    """What a name in an importable module makes when it is called without arguments; the working folder counts."""
    where = f"--model: {module_name}:{attribute}"
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"{where} cannot be imported: {error}") from error
    finally:
        sys.path.remove(here)
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = get_close_matches(part, [n for n in dir(found) if not n.startswith("_")], n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise UserError(f"{where}: '{part}' is not in {getattr(found, '__name__', found)}{hint}")
        found = getattr(found, part)

    def make() -> nn.Module:
        try:
            module = found if isinstance(found, nn.Module) else found()
        except TypeError as error:
            raise UserError(f"{where} has to work without arguments: {error}") from error
        if not isinstance(module, nn.Module):
            raise UserError(f"{where} is a {type(module).__name__}; it must be a module, or return one")
        return module

    return make
