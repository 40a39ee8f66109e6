"""Configs as YAML, and the engine's own plans and recipes in `plans`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.fuzz.kinds import Target, Unjudged
from tests.fuzz.mutations import TEXT
from wsi_trainer.foreign import read_yaml

CONFIG = """\
model:
  backbone: {class_path: wsi_trainer.models.ResNet, init_args: {depth: 18, widths: [8, 16]}}
  task: &task {classes: [a, "b c"], weight: 0.5}
data:
  manifest: slides.csv   # relative
  downsample: 2
  again: *task
train:
  epochs: 3
  budget: 12MiB
  loggers:
    - csv
    - 'tensorboard'
"""


def configs(folder: Path) -> Sequence[Path]:
    (folder / "config.yaml").write_text(CONFIG)
    return [folder / "config.yaml"]


def truth(path: Path) -> Any:
    """As ruamel reads YAML 1.1, in Python alone."""
    if re.search(rb"[&*][^\s,\[\]{}]*:", path.read_bytes()):
        raise Unjudged  # a colon ends the name of an anchor in YAML 1.1, and belongs to it in ruamel, as in 1.2
    if re.search(rb"(?<![\w.])[-+]?\d[\d_]*[eE][-+]?\d", path.read_bytes()):
        raise Unjudged  # 1e9 is a number in YAML 1.2 and to ruamel; in YAML 1.1 it lacks a point, and is a text
    if re.search(rb"(?<![\w.])[yYnN](?![\w.])", path.read_bytes()):
        raise Unjudged  # to ruamel y and n are true and false in YAML 1.1; PyYAML, which wants yes and no, reads texts
    reader = YAML(typ="safe", pure=True)
    reader.version = (1, 1)
    reader.allow_duplicate_keys = False
    try:
        return plain(reader.load(path.read_bytes().decode("utf-8-sig")))
    except Exception as error:
        raise Unjudged from error


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {repr(key): plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


TARGETS = (Target("config", configs, lambda path: plain(read_yaml(path)), truth, TEXT),)
