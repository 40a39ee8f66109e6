"""Configs as people write them: classes by the names of the field."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from wsi_trainer.cli import main
from wsi_trainer.fit.config import SHORT, instantiate, make_parser, own_classes, parse
from wsi_trainer.models import AttentionPooling, MultiClassTask, ResNet


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


@pytest.mark.parametrize("key", SHORT)
def test_each_name_is_of_a_class(key: str) -> None:
    assert set(SHORT[key].values()) <= {found.__name__ for found in own_classes(f"model.{key}")}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--model.head=abml", "model.head: there is no 'abml'; did you mean 'abmil'?"),
        ("--model.head=AttentionPoling", "model.head: there is no 'AttentionPoling'"),
        ("--model.task=binry", "did you mean 'binary'?"),
    ],
)
def test_a_wrong_name_is_one_line(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--out=run", "--data.manifest=s.csv", word]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
