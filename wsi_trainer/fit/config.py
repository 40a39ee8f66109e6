"""The config of a run: its keys, what is built of them, keys under `train`, short names."""

from __future__ import annotations

import json
import logging
import math
import re
from argparse import ArgumentError
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self

import pytorch_lightning as pl
import yaml
from jsonargparse import (  # type: ignore[attr-defined]
    ActionConfigFile,
    ArgumentParser,
    Namespace,
    get_loader,
)
from torch import nn

from wsi_trainer import models
from wsi_trainer.cli.parsing import Parser, about_refusal, explain, read_texts_safely, refuse_empty, suggest
from wsi_trainer.data.covariates import Covariates
from wsi_trainer.data.datamodule import SlideData
from wsi_trainer.data.dataset import DataConfig
from wsi_trainer.errors import UserError
from wsi_trainer.io.untrusted import yaml_of
from wsi_trainer.metrics.decision import MOST_PROBABLE, check_rule
from wsi_trainer.models import AveragePooling, FrozenFeatures, ModelConfig, PatchEncoder, SlideModel
from wsi_trainer.models.allowed import TRUST, about, check_backbone, denied, is_limited, limited
from wsi_trainer.models.encoders import is_encoder
from wsi_trainer.models.hub import is_on_hub
from wsi_trainer.models.weights import load_weights

KEYS = {
    "model.levels": "magnifications", "model.share_levels": "share_backbone", "model.trained": "finetune",
    "model.statistics": "batchnorm_over", "model.task.init_args.beside": "auxiliary",
    "model.task.init_args.beside_weight": "auxiliary_weight", "data.context": "extra_downsamples",
    "data.turn": "flip_rotate", "data.patches.turn": "flip_rotate", "train.splits": "split_grid",
    "train.wobble": "split_jitter",
}  # fmt: skip
"""Keys of version 0.1, which 1.0 takes in configs and on the command line, and what they are called since."""


def present_option(option: str) -> str:
    """The present name of an option of the command line, which may go on behind a former key."""
    old = next((old for old in KEYS if option == f"--{old}" or option.startswith(f"--{old}.")), None)
    return option if old is None else f"--{old.rpartition('.')[0]}.{KEYS[old]}{option[len(old) + 2 :]}"


def present_keys(content: Any, path: str = "") -> Any:
    """A config, or the part of one at a path that ends with a dot, with present keys."""
    if not isinstance(content, Mapping):
        return content
    present = {KEYS.get(f"{path}{key}", key): value for key, value in content.items()}
    return {key: present_keys(value, f"{path}{key}.") for key, value in present.items()}


AUTO = "auto"
Halo = Literal["auto", "recompute", "share", "split", "stochastic_split"]
Compile = Literal["never", "tiles", "graphs"]
Tracker = Literal["csv", "tensorboard", "wandb", "mlflow"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length and speed of the training, and the memory that it keeps within."""

    epochs: int = 10
    """Times that each slide is seen."""
    accumulate: int = 1
    """Slides whose gradients are averaged for one step of the optimizer, on each device."""
    clip: float = 1.0
    """Largest norm of the gradient of a step; 0 does not clip."""
    seed: int = 0
    """Decides initial weights, splits left open, order and orientations."""
    budget: str | None = AUTO
    """Device memory for a step, as "512MiB" or "8GiB", by tile-by-tile execution; auto takes most of what is free on
    the device, or half of the machine's memory without one; null runs plain PyTorch, which holds whole slides.
    """
    halo: Halo = "auto"
    """What tiles do about the rows between them. Exact: auto, recompute, share. Approximations: split trains with
    windows that see nothing beyond their split of the slide, stochastic_split cuts it at other places in each step.
    """
    split_grid: int | None = None
    """Into how many splits each side of a slide is cut, with `halo` split or stochastic_split."""
    split_depth: float | str = 0.5
    """Up to where: a share of the convolutions and poolings, or the path of a module."""
    split_jitter: float = 0.2
    """How far stochastic_split moves a cut at most, as a part of a split's side, below 0.5."""
    compile: Compile = "never"
    """Whether tiles that come often are compiled: never, tiles (torch.compile, some seconds for each kind of tile), or
    graphs (as CUDA graphs besides).
    """
    trim: bool = True
    """Whether the process gives freed memory back to the system where it keeps much more than the budget, on a CPU."""
    precision: str = AUTO
    """Precision of the Trainer: 32-true, bf16-mixed, 64-true, ...; auto is bf16-mixed on a GPU that has it, else
    32-true.
    """
    accelerator: str = AUTO
    """Device of the Trainer: auto, cpu, cuda."""
    devices: int = 1
    """How many devices; with more than one each slide is worked on by one of them, and gradients are averaged."""
    monitor: str = "val_loss"
    """Which number of the validation slides chooses the best checkpoint: val_loss, or `val_` and a task's score."""
    patience: int | None = None
    """Stop after this many epochs without a better `monitor`; without it all epochs run."""
    checkpoint_every: int = 25
    """Steps of the optimizer between two writes of last.ckpt, from which `--resume last` continues; it is written
    after each epoch too, and with 0 only then.
    """
    loggers: tuple[Tracker, ...] = ("csv", "tensorboard")
    """Where curves go: csv, tensorboard, wandb, mlflow; the last two are extras to be installed."""
    resamples: int = 1000
    """Resamples of the patients from which the intervals of scores are taken."""
    decision: str = MOST_PROBABLE
    """How a probability becomes a class: argmax takes the most probable one. With two classes, and for each of several
    labels, balanced_accuracy and f1 take the threshold with the highest score on the validation slides,
    sensitivity:0.95 and specificity:0.95 the one that reaches this share of them, and a number is the threshold itself.
    """

    def __post_init__(self) -> None:
        for name in ("epochs", "accumulate", "devices", "resamples"):
            if getattr(self, name) < 1:
                raise UserError(f"train.{name} is {getattr(self, name)}; it must be 1 or more")
        check_rule(self.decision)
        if not 0 <= self.clip < float("inf"):
            raise UserError(f"train.clip is {self.clip}; it must be 0 (off) or positive")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"train.seed is {self.seed}; it must be from 0 to {2**32 - 1}")
        if self.checkpoint_every < 0:
            raise UserError(f"train.checkpoint_every is {self.checkpoint_every}; it must be 0 or positive")
        if self.patience is not None and self.patience < 1:
            raise UserError(f"train.patience is {self.patience}; it must be 1 or more, or null for none")
        if (self.split_grid is None) == ("split" in self.halo):
            raise UserError(
                f"train.halo is {self.halo} and train.split_grid is {self.split_grid}; give split_grid, such as 2, "
                "with split or stochastic_split, and with no other halo"
            )
        if self.split_grid is not None and self.split_grid < 2:
            raise UserError(f"train.split_grid is {self.split_grid}; it must be 2 or more, or null for none")
        if not isinstance(self.split_depth, str) and not 0 < self.split_depth <= 1:
            raise UserError(f"train.split_depth is {self.split_depth}; it must be above 0 and at most 1, or a path")
        if not 0 <= self.split_jitter < 0.5:
            raise UserError(f"train.split_jitter is {self.split_jitter}; it must be 0 or more and below 0.5")
        for name, unset in (("halo", "auto"), ("compile", "never")):
            if self.budget is None and (said := getattr(self, name)) != unset:
                raise UserError(f"train.{name} is {said}, which needs tile-by-tile execution: give train.budget")
        if self.devices > 1 and self.budget is None:
            raise UserError(f"train.devices is {self.devices}, which needs tile-by-tile execution: give train.budget")


class Loaded(NamedTuple):
    """The parts of a run, as its config says them."""

    model: SlideModel
    data: DataConfig
    train: TrainConfig


log = logging.getLogger("wsi_trainer")

CLASSES: dict[str, tuple[type[nn.Module], ...]] = {
    "model.backbone": (
        models.Backbone,
        models.TimmBackbone,
        models.PatchEncoder,
        models.FrozenFeatures,
        models.NoSlide,
    ),
    "model.head": (models.Pooling,),
    "model.task": (models.Task,),
}
"""Of what kind the classes are that a key may name."""
ABSTRACT = (
    models.Backbone, models.Pooling, models.Task, models.ClassTask, models.SurvivalTask, models.MultiTargetTask,
)  # fmt: skip
KEPT = ("out", "model", "data", "train")
PATHS = (
    "data.manifest", "data.root", "data.stores", "data.splits", "data.features", "model.pretrained",
    "model.head_pretrained",
)  # fmt: skip
"""Keys with paths, which a run keeps as absolute ones."""
OF_RUN = ("data.manifest", "data.root", "data.splits", "data.fold", "data.validation", "data.test", "data.split_by")
"""Keys that say which slides a run has: the run keeps these."""


# The options of `fit`.


SHORT = {
    "backbone": {"features": "FrozenFeatures", "none": "NoSlide", "patches": "PatchEncoder"},
    "head": {
        "abmil": "AttentionPooling", "mean": "AveragePooling", "max": "MaxPooling", "gem": "GeneralisedMeanPooling",
        "topk": "TopKPooling", "clam": "ClassAttentionPooling", "dsmil": "DualStreamPooling",
        "transmil": "TransMILPooling", "transformer": "TransformerPooling",
        "chief": "Chief", "feather": "Feather", "gigapath": "GigaPath", "madeleine": "Madeleine", "prism": "Prism",
        "titan": "Titan",
    },
    "task": {
        "binary": "BinaryTask", "multiclass": "MultiClassTask", "multilabel": "MultiLabelTask",
        "ordinal": "OrdinalTask", "regression": "RegressionTask", "segmentation": "SegmentationTask",
        "survival": "HazardTask", "cox": "CoxTask",
    },
}  # fmt: skip
"""Names of classes as the field says them; the names of the classes themselves serve too, in any case."""
TARGETS = "targets"
"""The key with several tasks."""
NESTED = {"network": "backbone", "auxiliary": "task"}
"""Arguments that are parts of a model themselves, and whose short names they take."""


def spelled_out(part: str, value: Any) -> Any:
    """The class that a short name under `model` means: `abmil`, or `{name: abmil, hidden: 128}`, nested ones too.

    Any other name of a backbone is a network of timm. `targets` has a task by each name.
    """
    if part == TARGETS:
        return {name: spelled_out("task", one) for name, one in value.items()} if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping):
        return class_named(part, value) if isinstance(value, str) else value
    if "name" in value:
        named = class_named(part, str(value["name"]))
        arguments = {name: argument for name, argument in value.items() if name != "name"}
        if not named.startswith("timm:"):
            value = {"class_path": named, "init_args": arguments}
        elif not arguments:
            return named
        else:
            raise UserError(
                f"{place_of(part)}: {value['name']} is no network of this package, and one of timm takes no further "
                f"keys here ({', '.join(arguments)}); {suggest(str(value['name']).lower(), sorted(names_of(part)))}"
            )
    if not isinstance(value.get("init_args"), Mapping):
        return value
    arguments = value["init_args"].items()
    inner = {name: spelled_out(name, given) if name in NESTED else given for name, given in arguments}
    return {**value, "init_args": inner}


def place_of(part: str) -> str:
    """The key of a config with a part of the model: `model.backbone`, or `model.backbone.network`."""
    return f"model.{NESTED[part]}.{part}" if part in NESTED else f"model.{part}"


def names_of(part: str) -> dict[str, str]:
    """The class for each short name that a part of the model may have, and for each name of a class in lower case."""
    kind = NESTED.get(part, part)
    return {found.__name__.lower(): found.__name__ for found in own_classes(f"model.{kind}")} | SHORT[kind]


def class_named(part: str, name: str) -> str:
    """The import path, or the network of timm, that a name means; what is no short name is returned as it is."""
    if name == "null" or set(name) & set(".:{["):
        return name
    if found := names_of(part).get(name.lower()):
        return f"{models.__name__}.{found}"
    if part == "network" and is_encoder(name):
        return name
    kind = NESTED.get(part, part)
    if kind == "backbone":
        return f"timm:{name}"
    raise UserError(f"{place_of(part)}: there is no {name!r}; {suggest(name.lower(), sorted(SHORT[kind]))}")


OF_MODEL = re.compile(rf"--model\.(?:[\w.]+\.)?({'|'.join([*SHORT, *NESTED, TARGETS])})")
"""Options whose values are names of classes."""


def spelled_out_word(option: str, part: str, word: str) -> str:
    """The value of an option, which may be a mapping: `{name: abmil, hidden: 128}`."""
    if not word.lstrip().startswith("{"):
        return word if part == TARGETS else class_named(part, word)
    try:
        return json.dumps(spelled_out(part, get_loader("yaml")(word)))
    except yaml.YAMLError as error:
        raise UserError(f"{option}: {word} is no mapping: {getattr(error, 'problem', error)}") from error


def config_of(content: Any) -> Any:
    """A config with present keys, and with the classes that it names in short spelled out."""
    content = present_keys(content)
    if isinstance(content, Mapping) and isinstance(content.get("model"), Mapping):
        model = content["model"]
        return {**content, "model": {k: spelled_out(k, v) if k in (*SHORT, TARGETS) else v for k, v in model.items()}}
    return content


read_texts_safely(config_of)


class RunParser(Parser):
    """A parser whose configs hold what a run is, not what one command was asked to do with it.

    So a config that `fit --print-config` printed is one for `plan` and `embed` too.
    """

    whole_run = False  # the parsers of nested classes are of this class too

    def dump(self, cfg: Namespace, **options: Any) -> str:  # type: ignore[override]
        if self.whole_run:  # null is a value: `train.budget: null` is not the default
            cfg, options = Namespace(**{key: cfg[key] for key in KEPT if key in cfg}), {"skip_unset": False, **options}
        return super().dump(cfg, **options)


def make_parser(name: str, description: str) -> ArgumentParser:
    """The parser of a command that takes a whole config."""
    parser = RunParser(
        prog=f"wsi-train {name}", description=description, epilog=TRUST, exit_on_error=False, allow_abbrev=False
    )
    parser.whole_run = True
    parser.add_argument("--config", action=ActionConfigFile, help="a YAML file with any of the options below")
    if name != "plan":
        parser.add_argument("--out", type=Path, required=True, help="the folder that is written")
    else:
        parser.add_argument("--out", type=Path, default=None, help="not written to: a config may name it")
    parser.add_class_arguments(ModelConfig, "model")
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


def parse(parser: ArgumentParser, words: Sequence[str]) -> Namespace:
    """The options, not yet instantiated; what the parser refuses becomes one clear line."""
    refuse_empty(words)
    try:
        options = parser.parse_args(list(_spelled_out(words)))
    except (ArgumentError, UnicodeDecodeError) as error:
        if path := denied(error):
            key = next((key for key in CLASSES if f'"{key}' in str(error)), "the config")
            raise UserError(about(key, path)) from error
        raise explain(parser, error, list(words)) from error
    for key, value in options.items():
        if isinstance(value, float) and not math.isfinite(value) and key.startswith(("model.", "data.", "train.")):
            raise UserError(f"{key} is {value}; give a finite number")
    return options


def _spelled_out(words: Sequence[str]) -> Iterator[str]:
    """The words with present keys, and with the classes that they name in short spelled out."""
    before = ""
    for word in words:
        name, equals, value = word.partition("=")
        name = present_option(name)
        word = f"{name}{equals}{value}"
        option = name if equals else before
        of_model = OF_MODEL.fullmatch(option)
        if of_model is None:
            yield word
        elif equals:
            yield f"{name}={spelled_out_word(option, of_model[1], value)}"
        else:
            yield spelled_out_word(option, of_model[1], word)
        before = word


def instantiate(parser: ArgumentParser, options: Namespace) -> Loaded:
    """The model with its seeded initial weights, and the configs."""
    check_backbone(options.model.backbone)
    pl.seed_everything(options.train.seed, verbose=False)  # workers draw by slide and epoch, and import no Lightning
    try:
        objects = parser.instantiate(options)
        return Loaded(models.make_model(objects.model), objects.data, objects.train)
    except (ValueError, TypeError, RuntimeError) as error:
        cause = error.__cause__  # of a RuntimeError the parser makes a ValueError
        raised = cause if isinstance(cause, RuntimeError) else error
        if not isinstance(raised, RuntimeError):  # how classes refuse arguments, those of this package and any other
            raise UserError(about_refusal(error)) from error
        if "memory" in str(raised):  # that it is short is said elsewhere
            raise raised from None
        raise UserError(f"the network of model cannot be built: {str(raised).partition(chr(10))[0]}") from error


@cache
def _parser() -> ArgumentParser:
    """The parser of what a run is."""
    return make_parser("fit", "")


@dataclass(frozen=True, eq=False)
class Config:
    """Keys of a run, of which nothing is built yet. Runs that belong together have copies of one."""

    keys: Namespace
    """Those under `model`, `data` and `train`."""
    out: Path
    """The folder of the run."""

    @classmethod
    def of(cls, content: Mapping[str, Any], out: Path) -> Self:
        """The config with these keys; all others have their defaults."""
        return cls(_parser().parse_object({**content, "out": str(out)}), out)

    def changed(self, out: Path, keys: Mapping[str, Any] | None = None) -> Self:
        """A copy for another folder, with other values of keys such as `data.manifest`."""
        copied = self.keys.clone()
        for key, value in (keys or {}).items():
            copied[key] = value
        return type(self)(copied, out)

    @property
    def covariates(self) -> Covariates:
        """The columns beside the slide, fitted or not."""
        try:
            return Covariates.of(self.keys.model.covariates)
        except ValueError as error:
            raise UserError(str(error)) from error

    def fitted(self, kept: Covariates | None = None) -> Self:
        """The config with its covariates fitted on the slides of training, which it draws as the run will.

        Args:
            kept: Those of a run that goes on, which it keeps.
        """
        asked = self.covariates
        if not asked:
            return self
        if kept is None or not asked.like(kept):
            objects = _parser().instantiate(self.changed(self.out, {"model.backbone": None}).keys)
            task, data = objects.model.whole_task(), objects.data
            slides = SlideData(data, task, objects.train.seed)
            kept = asked.fit(slides.of("train"), task.columns)
        return self.changed(self.out, {"model.covariates": kept.said})

    def build(self) -> Loaded:
        """The model with its seeded initial weights, and the settings of data and training."""
        return instantiate(_parser(), self.keys)

    @property
    def text(self) -> str:
        """The file that a run keeps: with absolute paths, and without its folder, which may be moved."""
        kept = self.keys.clone()
        for key in PATHS:
            if kept.get(key) is not None and not is_on_hub(kept[key]):
                kept[key] = Path(kept[key]).absolute()
        kept.pop("out")
        return str(_parser().dump(kept, skip_validation=True))


class Origin(Protocol):
    """The folder of a run, or of an exported model: a trained model is read from it."""

    @property
    def config(self) -> Path:
        """The config of its network and settings."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """Keys of that to change, as words of the command line."""

    def checkpoint(self) -> Path:
        """The weights; an error where there are none."""


def load(origin: Origin, trust: bool = False) -> Loaded:
    """A model with its weights, in evaluation mode, and the settings.

    The config is checked before weights are looked for: it may be a stranger's, and what it asks for is said first.

    Args:
        origin: Where they are.
        trust: Whether the config may name code beyond this package; within a command its words say so.
    """
    with nullcontext() if is_limited() else limited(trust):
        options = _options_of(origin)
        weights = origin.checkpoint()
        loaded = instantiate(_parser(), options)
    if loaded.train.precision == "64-true":
        loaded.model.double()  # float32 would round the weights
    load_weights(loaded.model, weights)
    loaded.model.eval()
    return loaded


def keys_of(origin: Origin) -> dict[str, Any]:
    """The keys of the config of a model that is loaded, which is allowed thereby, with all defaults as plain values."""
    with nullcontext() if is_limited() else limited(True):
        options = _options_of(origin)
        return {key: value for key, value in yaml_of(_parser().dump(options), origin.config).items() if key != "out"}


def _options_of(origin: Origin) -> Namespace:
    return parse(_parser(), [f"--config={origin.config}", f"--out={origin.config.parent}", *origin.overrides])


def check_settings(model: SlideModel, data: DataConfig, config: TrainConfig) -> None:
    """Refuse settings that do not go together, before anything is read."""
    monitors = ["val_loss", *(f"val_{name}" for name in model.task.scores)]
    if config.monitor not in monitors:
        raise UserError(
            f"train.monitor is {config.monitor!r}; with {type(model.task).__name__} it is one of {', '.join(monitors)}"
        )
    if model.magnifications != (whole := 1 + len(data.extra_downsamples)):
        raise UserError(
            f"data.extra_downsamples has {whole - 1} further magnifications and model.magnifications is "
            f"{model.magnifications}; set it to {whole}"
        )
    if config.decision != MOST_PROBABLE and not any(part.task.has_threshold for part in model.task.slide_parts):
        raise UserError(
            f"train.decision is {config.decision}, a threshold for two classes or for several labels, and "
            f"{type(model.task).__name__} has none of these; set it to {MOST_PROBABLE}"
        )
    if model.sees_slide:
        check_bags(model, data)
    else:
        check_alone(model, config)
    if config.devices > 1 and data.on_error == "skip":
        raise UserError("data.on_error is skip with several devices, which would wait for each other; use stop")


def check_alone(model: SlideModel, config: TrainConfig) -> None:
    """Refuse what a network has no use for that sees no slide."""
    name = "model.backbone is NoSlide"
    if not model.covariates:
        raise UserError(f"{name} and there are no model.covariates: nothing can be learnt; give one of them")
    if type(model.head) is not AveragePooling or model.wants_tissue or model.magnifications > 1:
        raise UserError(f"{name}: leave out the other keys of the network, such as model.head")
    if config.budget is not None:
        raise UserError(f"{name}, of which nothing is tiled; set train.budget to null")


def check_bags(model: SlideModel, data: DataConfig) -> None:
    """Refuse bags for a network that takes images, images for one that takes bags, and what bags have no use for."""
    encoder = model.backbone if isinstance(model.backbone, PatchEncoder) else None
    prepared = isinstance(model.backbone, FrozenFeatures)
    if prepared != (data.features is not None):
        raise UserError("model.backbone FrozenFeatures and data.features go together: give both, or neither")
    if prepared:
        if model.task.dense or model.wants_tissue:
            raise UserError(
                "data.features has a vector for each patch and no map of the slide; leave out what needs one"
            )
        return
    if data.patches is None:
        if encoder is not None:
            raise UserError("model.backbone is PatchEncoder, which takes patches, and data.patches is not given")
        return
    if encoder is None:
        raise UserError(
            f"data.patches makes a bag of each slide, and model.backbone {type(model.backbone).__name__} takes an "
            "image; set model.backbone to PatchEncoder, with this one as its network"
        )
    if encoder.size != data.patches.size:
        raise UserError(
            f"data.patches.size is {data.patches.size} and model.backbone.size is {encoder.size}; give both one value"
        )
    if encoder.published is not None and not _near(encoder.published.mpp, data.patches.mpp):
        log.warning(
            "data.patches.mpp is %s, and %s was trained at about %g; give that, unless you mean it",
            data.patches.mpp, encoder.published.name, encoder.published.mpp,
        )  # fmt: skip
    if model.task.dense:
        raise UserError(f"{type(model.task).__name__} has a class for each pixel of an image; leave out data.patches")
    if model.wants_tissue:
        key = "pool_over" if model.pool_over == "tissue" else "batchnorm_over"
        raise UserError(f"model.{key} is tissue, which is for whole images; data.patches.over: tissue chooses patches")


def _near(meant: float, given: float | Literal["own"]) -> bool:
    """True if patches of this resolution look as those that an encoder was trained on; unknown is taken to."""
    return given == "own" or 0.66 <= given / meant <= 1.5
