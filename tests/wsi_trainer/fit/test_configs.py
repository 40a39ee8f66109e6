"""Every config in `configs/` is one that `wsi-train fit` takes, and its network runs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser

from lightning_plugin import SFTStrategy
from wsi_trainer.cli import main
from wsi_trainer.cli.parsing import keys_of
from wsi_trainer.errors import UserError
from wsi_trainer.fit.config import (
    CLASSES,
    SHORT,
    Config,
    TrainConfig,
    check_settings,
    instantiate,
    make_parser,
    own_classes,
    parse,
)
from wsi_trainer.fit.plan import plan, plan_shape
from wsi_trainer.fit.trainer import make_trainer
from wsi_trainer.models import (
    AttentionPooling,
    BinaryTask,
    ModelConfig,
    MultiClassTask,
    ResNet,
    SegmentationTask,
    SlideBatch,
    SlideSegmenter,
    UNet,
)
from wsi_trainer.models.weights import load_weights

CONFIGS = sorted((Path(__file__).resolve().parents[3] / "configs").glob("*.yaml"))
ADDITIONS = {"card-11gib.yaml", "cpu-only.yaml", "multi-gpu.yaml"}
"""Configs that change the machine only, to be put after one with a model."""


def words(config: Path) -> list[str]:
    base = config.with_name("demo.yaml") if config.name in ADDITIONS else None
    return [f"--config={path}" for path in (base, config) if path]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_is_accepted_and_its_network_classifies_a_small_slide(config: Path) -> None:
    parser = make_parser("fit", "")
    options = parse(parser, words(config))
    model, data, train = instantiate(parser, options)
    assert train.budget is not None and train.budget == options.train.budget
    images = [
        torch.zeros(1, 3, 128 // 4**level, 160 // 4**level, dtype=torch.uint8) for level in range(model.magnifications)
    ]
    if data.patches is not None:
        images = [torch.zeros(2, 3, data.patches.size, data.patches.size, dtype=torch.uint8)]
    with torch.no_grad():
        batch = SlideBatch(image=images[0], context=images[1:], targets={}, slide="a")
        predicted = model.eval().predicted(batch)
    assert predicted.shape == (1, len(model.task.names)) and predicted.isfinite().all()
    if model.task.classes:
        classes = predicted[:, : len(model.task.classes)]
        torch.testing.assert_close(classes.sum(dim=1), torch.ones(1))


def sizes() -> Iterator[Any]:
    """A slide for each config; to search for plans of a U-Net takes long, so in a sample its slide is smaller."""
    for path in CONFIGS:
        long = path.stem.startswith("segmentation")
        if long:
            yield pytest.param(path, 768, 576, id=f"{path.stem}-smaller")
        yield pytest.param(path, 3072, 2304, id=path.stem, marks=[pytest.mark.full] if long else [])


@pytest.mark.slow
@pytest.mark.parametrize(("config", "height", "width"), list(sizes()))
def test_plans_a_step_without_data(config: Path, height: int, width: int) -> None:
    parser = make_parser("fit", "")
    model, data, train = instantiate(parser, parse(parser, words(config)))
    check_settings(model, data, train)
    assert train.budget is not None
    factors = [factor / data.downsample for factor in data.extra_downsamples]
    shape = (1, 3, height, width) if data.patches is None else (60, 3, data.patches.size, data.patches.size)
    plan = plan_shape(model, shape, train.budget, "cuda", factors)
    assert plan.budget is not None and 0 < plan.peak_bytes <= plan.budget


def test_a_dumped_config_reads_back_the_same() -> None:
    parser = make_parser("fit", "")
    options = parse(parser, words(CONFIGS[0]))
    again = parser.parse_string(parser.dump(options))
    assert parser.dump(again) == parser.dump(options)
    assert again.model == options.model and again.model.backbone.init_args


# -- configs as people write them: classes by the names of the field


@pytest.mark.parametrize("out", ["run", "Ü: #1", f"{'a' * 70} {'b' * 9} c", " ".join("c" * 200), "a\nb"])
def test_the_config_of_a_run_is_without_its_folder_whatever_that_is_called(out: str) -> None:
    kept = Config.of({"data": {"manifest": "/s.csv"}}, Path(out)).text
    assert kept == Config.of({"data": {"manifest": "/s.csv"}}, Path("x")).text
    assert set(yaml.safe_load(kept)) == {"model", "data", "train"}


def test_names_in_a_config_mean_classes(tmp_path: Path) -> None:
    task = {"name": "multiclass", "classes": ["a", "b", "c"]}
    content = {"model": {"backbone": "resnet", "head": {"name": "abmil", "hidden": 7}, "task": task}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(content))
    words = [f"--config={tmp_path / 'c.yaml'}", "--out=run", "--data.manifest=slides.csv"]
    parser = make_parser("fit", "")
    options = parse(parser, words)
    model = instantiate(parser, options).model
    assert isinstance(model.backbone, ResNet) and isinstance(model.head, AttentionPooling)
    assert isinstance(model.task, MultiClassTask) and model.task.classes == ("a", "b", "c")
    long = tmp_path / "long.yaml"
    long.write_text(parser.dump(options))
    assert "wsi_trainer.models.ResNet" in long.read_text()
    assert parse(parser, [f"--config={long}"]).model == options.model


def test_names_on_the_command_line_mean_classes() -> None:
    parser = make_parser("fit", "")
    words = ["--out=run", "--data.manifest=s.csv", "--model.backbone", "VGG", "--model.backbone.widths=[4]"]
    model = parse(parser, [*words, "--model.head=transmil", "--model.task", "binary"]).model
    assert model.backbone.class_path.endswith("VGG") and model.backbone.init_args.widths == [4]
    assert model.head.class_path.endswith("TransMILPooling") and model.task.class_path.endswith("BinaryTask")
    assert parse(parser, [*words[:2], "--model.backbone=resnet50"]).model.backbone == "timm:resnet50"


def test_a_mapping_on_the_command_line_is_that_of_a_config(tmp_path: Path) -> None:
    parts = {
        "model.backbone": "{name: patches, size: 32, network: {name: resnet, widths: [4, 8]}}",
        "model.head": "{name: abmil, hidden: 7}",
        "model.task": "{name: segmentation, classes: [a, b], auxiliary: binary}",
    }
    lines = [f"  {key.removeprefix('model.')}: {value}" for key, value in parts.items()]
    (tmp_path / "c.yaml").write_text("\n".join(["model:", *lines]))
    parser = make_parser("fit", "")
    given = ["--out=run", "--data.manifest=slides.csv"]
    model = parse(parser, [*given, f"--config={tmp_path / 'c.yaml'}"]).model
    assert model.backbone.init_args.network.class_path.endswith("ResNet")
    assert model.task.init_args.auxiliary.class_path.endswith("BinaryTask")
    for words in (
        [f"--{key}={value}" for key, value in parts.items()],
        [w for k, v in parts.items() for w in (f"--{k}", v)],
    ):
        assert parse(parser, [*given, *words]).model == model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "meant"), [("resnet18", "timm:resnet18"), ("resnet50", "resnet50"), ("timm:vit_a", "timm:vit_a")]
)
def test_a_network_of_patches_is_a_published_encoder_or_one_of_timm(network: str, meant: str) -> None:
    parser = make_parser("fit", "")
    mapping = [f"--model.backbone={{name: patches, network: {network}}}"]
    for words in (mapping, ["--model.backbone=patches", f"--model.backbone.network={network}"]):
        options = parse(parser, ["--out=run", "--data.manifest=s.csv", *words])
        assert options.model.backbone.init_args.network == meant


def test_shipped_configs_are_in_the_short_form() -> None:
    assert not [path.name for path in CONFIGS if "class_path" in path.read_text()]


@pytest.mark.parametrize("key", SHORT)
def test_each_name_is_of_a_class(key: str) -> None:
    assert set(SHORT[key].values()) <= {found.__name__ for found in own_classes(f"model.{key}")}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--model.head=abml", "model.head: there is no 'abml'; did you mean 'abmil'?"),
        ("--model.head=AttentionPoling", "model.head: there is no 'AttentionPoling'"),
        ("--model.task=binry", "did you mean 'binary'?"),
        ("--model.task={name: segmentation, auxiliary: binry}", "model.task.auxiliary: there is no 'binry'"),
        ("--model.head={name: abml, hidden: 7}", "model.head: there is no 'abml'; did you mean 'abmil'?"),
        ("--model.head={name: abmil, hiden: 7}", "did you mean 'hidden'?"),
        ("--model.head={name: abmil, hidden: 7", "--model.head: {name: abmil, hidden: 7 is no mapping"),
        ("--model.backbone={name: resnt, widths: [4]}", "takes no further keys here (widths); did you mean 'resnet'?"),
    ],
)
def test_a_wrong_name_is_one_line(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--out=run", "--data.manifest=s.csv", word]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


# -- configs and checkpoints of earlier versions, whose keys had other names


NEW = """
model:
  task:
    class_path: wsi_trainer.models.SegmentationTask
    init_args:
      classes: [normal, lesion]
      drawn: {1: lesion}
      auxiliary: {class_path: wsi_trainer.models.BinaryTask}
      auxiliary_weight: 0.5
  finetune: norms
  batchnorm_over: tissue
  magnifications: 2
  share_backbone: true
data:
  manifest: slides.csv
  extra_downsamples: [4]
  flip_rotate: false
  patches: {flip_rotate: false}
train: {halo: stochastic_split, split_grid: 2, split_jitter: 0.1}
"""
FORMER = {
    "auxiliary": "beside", "finetune": "trained", "batchnorm_over": "statistics", "magnifications": "levels",
    "share_backbone": "share_levels", "extra_downsamples": "context", "flip_rotate": "turn", "split_grid": "splits",
    "split_jitter": "wobble",
}  # fmt: skip
"""Keys of earlier versions."""
OLD = re.sub("|".join(FORMER), lambda found: FORMER[found[0]], NEW)


def read(folder: Path, text: str, *words: str) -> str:
    """The config that these options are, as a run keeps it."""
    (folder / "config.yaml").write_text(text)
    parser = make_parser("fit", "")
    return parser.dump(parse(parser, [f"--config={folder / 'config.yaml'}", f"--out={folder / 'run'}", *words]))


def test_a_config_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    assert "patches" in read(tmp_path, NEW)
    assert read(tmp_path, OLD) == read(tmp_path, NEW)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["--model.levels=3"], ["--model.magnifications=3"]),
        (["--model.trained", "last"], ["--model.finetune", "last"]),
        (["--data.patches.turn=true"], ["--data.patches.flip_rotate=true"]),
        (["--model.task.init_args.beside_weight=2"], ["--model.task.init_args.auxiliary_weight=2"]),
    ],
)
def test_options_of_an_earlier_version_are_read(old: list[str], new: list[str], tmp_path: Path) -> None:
    asked = read(tmp_path, NEW, *new)
    assert asked != read(tmp_path, NEW) and read(tmp_path, NEW, *old) == asked


def test_weights_of_an_earlier_version(tmp_path: Path) -> None:
    def model() -> SlideSegmenter:
        return SlideSegmenter(backbone=UNet((4,)), task=SegmentationTask("ab", auxiliary=BinaryTask()))

    first, second = model(), model()
    names = {"task.tasks.0.": "task.", "task.tasks.1.": "task.beside.", "slide_classifier.": "beside."}
    former = first.state_dict()
    for new, old in names.items():
        former = {re.sub(f"^{re.escape(new)}", old, name): value for name, value in former.items()}
    assert former.keys() != first.state_dict().keys()
    torch.save({"state_dict": former}, tmp_path / "last.ckpt")
    load_weights(second, tmp_path / "last.ckpt")
    for name, value in second.state_dict().items():
        torch.testing.assert_close(value, first.state_dict()[name], rtol=0, atol=0)


# -- splits in a config: what is refused, what the strategy is given, and what the report says of it


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"halo": "split"}, "train.split_grid is None; give split_grid"),
        ({"split_grid": 2}, "train.halo is auto and train.split_grid is 2"),
        ({"halo": "split", "split_grid": 1}, "it must be 2 or more"),
        ({"halo": "split", "split_grid": 2, "split_depth": 1.5}, "train.split_depth is 1.5"),
        ({"halo": "stochastic_split", "split_grid": 2, "split_jitter": 0.5}, "train.split_jitter is 0.5"),
        ({"halo": "split", "split_grid": 2, "budget": None}, "give train.budget"),
        ({"compile": "tiles", "budget": None}, "train.compile is tiles, which needs tile-by-tile execution"),
    ],
)
def test_what_is_wrong_is_named(words: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TrainConfig(**words)


def test_the_strategy_is_given_what_the_config_says(tmp_path: Path) -> None:
    config = TrainConfig(
        halo="stochastic_split",
        split_grid=3,
        split_depth="layer2",
        split_jitter=0.1,
        budget="1GiB",
        accelerator="cpu",
        compile="tiles",
    )
    strategy = make_trainer(config, tmp_path, progress=False).strategy
    assert isinstance(strategy, SFTStrategy)
    found = strategy.engine.options.splitting
    assert strategy.engine.options.compile == "tiles"
    assert found is not None and (found.counts, found.depth, found.wobble) == ((3,), "layer2", 0.1)


def test_a_plan_of_the_command_is_split(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "ResNet", "--image", "512x512", "--budget", "300MiB", "--halo", "split", "--splits", "2"]
    assert plan(words) == 0
    assert "an approximation in training: splits 2 along each axis up to 50 %" in capsys.readouterr().out


# -- every key of a config is explained where a user looks: in --help, and in the comments of --print_config


PARSER = make_parser("fit", "")
NAMED = [(key, named) for key in CLASSES for named in own_classes(key)]


def unexplained(parser: ArgumentParser) -> list[str]:
    keys = keys_of(parser)
    texts = {action.dest: action.help for action in parser._actions}
    return [key for key in keys if not (texts[key] or "").strip() or texts[key] == "==SUPPRESS=="]


@pytest.mark.parametrize(("key", "named"), NAMED, ids=lambda x: getattr(x, "__name__", ""))
def test_every_argument_of_every_class_has_help_and_the_class_can_be_named(key: str, named: type) -> None:
    parser = ArgumentParser()
    skip = {"channels"} if key == "model.head" else set()
    parser.add_class_arguments(named, "init", skip=skip)
    assert unexplained(parser) == []
    needed = {"classes": ["a", "b"], "name": "resnet18"}
    parameters = inspect.signature(named).parameters
    init = {name: value for name, value in needed.items() if name in parameters}
    options = ["--out=x", "--data.manifest=m", f"--{key}=wsi_trainer.models.{named.__name__}"]
    parsed = PARSER.parse_args([*options, *(f"--{key}.init_args.{name}={value}" for name, value in init.items())])
    assert parsed[key].class_path == f"wsi_trainer.models.{named.__name__}"


def test_the_printed_config_has_comments_and_reads_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--out=run", "--data.manifest=slides.csv", "--print-config=comments"]) == 0
    shown = capsys.readouterr().out
    content = yaml.safe_load(shown)
    assert content["train"]["budget"] == "auto" and content["data"]["manifest"] == "slides.csv"
    assert "# Device memory for a step" in shown and "# Times that each slide is seen" in shown
    assert "torch.nn." not in shown and "ResNet" in shown  # what can be named, not all that was ever imported
    assert PARSER.parse_string(shown).train.budget == "auto"


def test_the_model_is_named_as_its_argument() -> None:
    assert set(inspect.signature(ModelConfig).parameters) == {
        key.removeprefix("model.") for key in keys_of(PARSER) if key.startswith("model.")
    }
