"""Every key of a config is explained where a user looks: in --help, and in the comments of --print_config."""

import inspect

import pytest
import yaml
from jsonargparse import ArgumentParser

from wsi_trainer.cli import main
from wsi_trainer.cli.parsing import keys_of
from wsi_trainer.fit.config import CLASSES, make_parser, own_classes
from wsi_trainer.models import ModelConfig

PARSER = make_parser("fit", "")
NAMED = [(key, named) for key in CLASSES for named in own_classes(key)]


def unexplained(parser: ArgumentParser) -> list[str]:
    keys = keys_of(parser)
    texts = {action.dest: action.help for action in parser._actions}
    return [key for key in keys if not (texts[key] or "").strip() or texts[key] == "==SUPPRESS=="]


def test_every_key_has_help() -> None:
    assert len(keys_of(PARSER)) > 35
    assert unexplained(PARSER) == []


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
