"""Configs, command lines and checkpoints of earlier versions, whose keys had other names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from wsi_trainer.fit.config import make_parser, parse
from wsi_trainer.models import BinaryTask, SegmentationTask, SlideSegmenter, UNet
from wsi_trainer.models.pretrained import load_weights

OLD = """
model:
  task:
    class_path: wsi_trainer.models.SegmentationTask
    init_args:
      classes: [normal, lesion]
      drawn: {1: lesion}
      beside: {class_path: wsi_trainer.models.BinaryTask}
      beside_weight: 0.5
  trained: norms
  statistics: tissue
  levels: 2
  share_levels: true
data:
  manifest: slides.csv
  context: [4]
  turn: false
  patches: {turn: false}
train: {halo: stochastic_split, splits: 2, wobble: 0.1}
"""
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


TASK = "--model.task={{class_path: wsi_trainer.models.SegmentationTask, init_args: {{classes: [a, b], {}: 2}}}}"


def read(folder: Path, text: str, *words: str) -> str:
    """The config that these options are, as a run keeps it."""
    (folder / "config.yaml").write_text(text)
    parser = make_parser("fit", "")
    return parser.dump(parse(parser, [f"--config={folder / 'config.yaml'}", f"--out={folder / 'run'}", *words]))


def test_a_config_of_an_earlier_version_is_read_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "patches" in read(tmp_path, NEW) and not capsys.readouterr().err
    for _ in range(2):
        assert read(tmp_path, OLD) == read(tmp_path, NEW)
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1 and "model.levels is now magnifications" in said[0], said


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["--model.levels=3"], ["--model.magnifications=3"]),
        (["--model.trained", "last"], ["--model.finetune", "last"]),
        (["--model.task.init_args.beside_weight=2"], ["--model.task.init_args.auxiliary_weight=2"]),
        ([TASK.format("beside_weight")], [TASK.format("auxiliary_weight")]),
    ],
)
def test_options_of_an_earlier_version(
    old: list[str], new: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = read(tmp_path, NEW, *new)
    assert asked != read(tmp_path, NEW) and not capsys.readouterr().err
    assert read(tmp_path, NEW, *old) == asked
    assert "is now" in capsys.readouterr().err


def test_weights_of_an_earlier_version(tmp_path: Path) -> None:
    def model() -> SlideSegmenter:
        return SlideSegmenter(backbone=UNet((4,)), task=SegmentationTask("ab", auxiliary=BinaryTask()))

    first, second = model(), model()
    former = {name.replace("auxiliary", "beside"): value for name, value in first.state_dict().items()}
    assert former.keys() != first.state_dict().keys()
    torch.save({"state_dict": former}, tmp_path / "last.ckpt")
    load_weights(second, tmp_path / "last.ckpt")
    for name, value in second.state_dict().items():
        torch.testing.assert_close(value, first.state_dict()[name], rtol=0, atol=0)
