"""The parser of a run: `--out`, and the groups `model`, `data` and `train`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, set_parsing_settings  # type: ignore[attr-defined]
from torch import nn

from wsi_trainer import models
from wsi_trainer.cli.texts import read_texts_safely
from wsi_trainer.data import DataConfig
from wsi_trainer.fit.config import TrainConfig
from wsi_trainer.models import SlideClassifier

read_texts_safely()
# The text under each field of a config is its help.
set_parsing_settings(docstring_parse_attribute_docstrings=True)

CLASSES: dict[str, tuple[type[nn.Module], ...]] = {
    "model.backbone": (models.Backbone, models.TimmBackbone, models.PatchEncoder, models.FrozenFeatures),
    "model.head": (models.Pooling,),
    "model.task": (models.Task,),
}
"""Of what kind the classes are that a key may name."""
TRUST = (
    "--trust, which only the command line can give, lets the config name classes and functions beyond this package: "
    "naming code in a config runs it."
)
KEPT = ("out", "model", "data", "train")
ABSTRACT = (models.Backbone, models.Pooling, models.Task, models.ClassTask, models.SurvivalTask)


class RunParser(ArgumentParser):
    """A parser whose configs hold what a run is, not what one command was asked to do with it.

    So a config that `fit --print_config` printed is one for `test` too.
    """

    whole_run = False  # the parsers of nested classes are of this class too

    def dump(self, cfg: Namespace, **options: Any) -> str:  # type: ignore[override]
        kept = Namespace(**{key: cfg[key] for key in KEPT if key in cfg}) if self.whole_run else cfg
        return super().dump(kept, **options)


def make_parser(name: str, description: str) -> ArgumentParser:
    """The parser of a command that works on a run."""
    parser = RunParser(
        prog=f"wsi-train {name}", description=description, epilog=TRUST, exit_on_error=False, allow_abbrev=False
    )
    parser.whole_run = True
    parser.add_argument("--config", action=ActionConfigFile, help="a YAML file with any of the options below")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the run")
    parser.add_class_arguments(SlideClassifier, "model")
    parser.add_class_arguments(DataConfig, "data")
    parser.add_class_arguments(TrainConfig, "train")
    for action in parser._actions:
        if action.dest in CLASSES:  # by default every torch module that was ever imported is listed
            action.extra_help = partial(_listed, action.dest)  # type: ignore[attr-defined]
    return parser


def own_classes(key: str) -> list[type[nn.Module]]:
    """The classes of this package that a key may name."""
    found = (getattr(models, name) for name in models.__all__)
    return [
        c for c in found if isinstance(c, type) and issubclass(c, CLASSES[key]) and c not in ABSTRACT
    ]  # fmt: skip


def _listed(key: str) -> str:
    return ", classes of wsi_trainer.models: " + ", ".join(c.__name__ for c in own_classes(key))
