"""A backbone by its name in a config."""

from __future__ import annotations

import importlib

from torch import nn

from wsi_trainer.errors import UserError
from wsi_trainer.models.backbones.timm import TimmBackbone
from wsi_trainer.models.backbones.vgg import VGG


def make_backbone(named: nn.Module | str | None) -> nn.Module:
    """The module itself, `timm:NAME`, or what an import path makes without arguments; a small VGG by default."""
    if named is None:
        return VGG()
    if isinstance(named, nn.Module):
        return named
    if named.startswith("timm:"):
        return TimmBackbone(named.removeprefix("timm:"))
    module_name, _, name = named.rpartition(".")
    try:
        factory = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"model.backbone: nothing can be imported as {named!r} ({error}); give timm:NAME, or the import path of a "
            "class such as wsi_trainer.models.ResNet"
        ) from error
    made = factory() if callable(factory) else factory
    if not isinstance(made, nn.Module):
        raise UserError(f"model.backbone: {named} makes a {type(made).__name__}, not a torch module")
    return made
