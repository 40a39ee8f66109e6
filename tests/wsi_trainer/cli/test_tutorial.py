"""The tutorials on encoders and on two hospitals, run as they are printed."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

from wsi_trainer.cli import main
from wsi_trainer.synthetic import generate

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "tutorial" / "fine-tune-an-encoder.md"
MAKES_SLIDES = (
    """python -c "from wsi_trainer.synthetic import generate; generate('slides', slides=12, side=256, seed=1)\""""
)


@pytest.mark.full  # `fit --compare` is tested in fit/test_compare.py
@pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is absent")
def test_the_tutorial_on_encoders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)
    commands = [line for kind, block in blocks if kind == "sh" for line in block.splitlines()]
    assert commands.pop(0) == MAKES_SLIDES
    generate(tmp_path / "slides", slides=12, side=256, seed=1, workers=1)
    (config,) = (block for kind, block in blocks if kind == "yaml")
    (tmp_path / "mine.yaml").write_text(config)
    (program,) = (block for kind, block in blocks if kind == "python")
    exec(compile(program, str(PAGE), "exec", dont_inherit=True), {"__name__": __name__})
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "wsi-train" and main(words) == 0, command
    facts = json.loads((tmp_path / "runs" / "mine" / "comparison.json").read_text())
    assert facts["runs"] == ["end to end", "frozen features"] and facts["slides"] > 0
    assert len(list((tmp_path / "features").glob("*.h5"))) == 12
    assert (tmp_path / "runs" / "mine" / "run" / "report.html").is_file()


@pytest.mark.full
@pytest.mark.slow
def test_the_tutorial_on_two_hospitals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network of north has learnt the lesion, in south too; all pages and the model are there, and say so."""
    text = (ROOT / "docs" / "tutorial" / "two-hospitals.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for kind, block in re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL):
        if kind == "yaml":
            before = text[: text.index(block)]
            Path(re.findall(r"`([\w-]+\.yaml)`", before)[-1]).write_text(block)
        elif kind == "python":
            exec(compile(block, "two-hospitals.md", "exec", dont_inherit=True), {"__name__": __name__})
        elif kind == "sh":
            for command in block.splitlines():
                program, *words = shlex.split(command)
                if program == "python":
                    exec(words[-1], {})
                else:
                    assert program == "wsi-train" and main(words) == 0, command
    compared = json.loads(Path("runs/study/comparison.json").read_text())
    deployed = json.loads(Path("deployments/south/deployment.json").read_text())
    assert compared["scores"]["auc"]["values"][0] > 0.75 and deployed["external"]["slide"]["auc"]["value"] > 0.7
    unlike = {one["name"] for one in deployed["shift"] if one["unlike"]}
    assert {"µm a pixel", "scanner or format", "haematoxylin", "eosin"} <= unlike
    survived = json.loads(Path("deployments/south-survival/deployment.json").read_text())
    assert survived["patients"] == deployed["patients"]
    for folder in ("runs/study", "runs/survival", "deployments/south", "deployments/south-survival"):
        assert Path(folder, "report.html").stat().st_size > 10_000
    assert Path("model", "README.md").is_file() and Path("view", "index.html").is_file()
