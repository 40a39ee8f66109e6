"""`wsi-train fit --compare`: two runs on the same slides and splits, and what one gains and costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from tests.wsi_trainer.fit.whole_bags import STRIDE, resnet, write_config
from wsi_trainer.cli import main
from wsi_trainer.data.manifest import read_manifest
from wsi_trainer.fit.run import Run
from wsi_trainer.fit.study import Study
from wsi_trainer.io.files import read_json
from wsi_trainer.metrics import Interval, auc, paired_difference, read_predictions
from wsi_trainer.models import ResNet


@pytest.fixture
def config(bag_stores: Path, tmp_path: Path) -> Path:
    torch.manual_seed(3)
    torch.save(ResNet((4, 8), norm="group").state_dict(), tmp_path / "encoder.pt")
    return write_config(
        tmp_path, bag_stores / "manifest.csv", resnet(4, 8), patches={"stride": STRIDE, "over": "slide"},
        train={"resamples": 50, "budget": "8MiB"}, finetune="last", last_stages=1,
        pretrained=str(tmp_path / "encoder.pt"),
    )  # fmt: skip


@pytest.mark.slow
def test_end_to_end_against_frozen_features_of_the_same_slides(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["fit", f"--config={config}", "--compare=frozen"]
    assert main(words) == 0
    out, shown = tmp_path / "run", capsys.readouterr().out
    runs = Run(out / "run"), Run(out / "frozen")
    splits = [{r.slide: r.split for r in read_manifest(run.splits)} for run in runs]
    assert splits[0] == splits[1]
    facts = json.loads((out / "comparison.json").read_text(), parse_constant=pytest.fail)
    for path in out.rglob("*.json"):
        json.loads(path.read_text(), parse_constant=pytest.fail)
    first, second = (read_predictions(run.predictions_file("test")) for run in runs)
    assert facts["slides"] == 2 and facts["scores"]["auc"]["values"] == [auc(first), auc(second)]
    found = Interval.of(facts["scores"]["auc"]["difference"])
    assert str(found) == str(paired_difference(first, second, auc, 50, 0))
    assert found.absent and facts["scores"]["auc"]["difference"]["low"] is None, "NaN is no JSON"
    assert "end to end against frozen features, 2 slides" in shown and "most memory of a step, end to end" in shown
    for cost in (*facts["costs"], facts["features"]):
        assert cost["seconds"] > 0 and cost["process_bytes"] > 2**20
    assert facts["costs"][0]["step_bytes"] == read_json(runs[0].memory)["step_peak_bytes"] > 0
    assert {path.suffix for path in (out / "features").iterdir() if path.is_file()} == {".h5", ".json"}
    for _ in range(2):
        page = (out / "report.html").read_text()
        assert "frozen features" in page and "time, end to end" in page and f"<h1>{out.name}</h1>" in page
        (out / "report.html").unlink()
        assert main(["report", str(out)]) == 0
    assert (
        torch.load(runs[1].checkpoint("last"), weights_only=True)["state_dict"]
        .keys()
        .isdisjoint(
            name
            for name in torch.load(runs[0].checkpoint("last"), weights_only=True)["state_dict"]
            if "backbone" in name
        )
    )
    assert main(words) == 2
    assert "is not empty; choose another --out, or continue" in capsys.readouterr().err
    before = runs[0].evaluation("test").stat().st_mtime_ns
    assert main([*words, "--resume=last"]) == 0
    assert runs[0].evaluation("test").stat().st_mtime_ns == before, "what is done is kept"


@pytest.mark.slow
def test_folds_of_both_runs_hold_out_the_same_slides(
    words: list[str], square_slides: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [f"--data.manifest={square_slides}", "--train.epochs=1", "--folds=2", "--compare=thumbnail"]
    assert main(["fit", *words, *more]) == 0
    out = tmp_path / "run"
    for fold in ("fold0", "fold1"):
        held = [read_predictions(Run(out / run / fold).predictions_file("val")).slides for run in ("run", "thumbnail")]
        assert held[0] == held[1]
    facts = read_json(out / "comparison.json")
    assert facts["runs"] == ["full resolution", "thumbnail"] and facts["features"] is None
    free = [r for r in read_manifest(square_slides) if r.split != "test"]
    assert facts["slides"] == len(free)
    study = Study.open(out)
    assert study.names == ("full resolution", "thumbnail") and study.folders == ("run", "thumbnail")
    assert [part is not None and part.kind for part in study.parts.values()] == ["folds", "folds"]
    (out / "study.json").unlink()  # version 1.0 wrote none
    assert Study.open(out) == study
    capsys.readouterr()
    assert main(["status", str(out), "--json"]) == 0
    said = [one["run"] for one in json.loads(capsys.readouterr().out)["runs"]]
    assert said == [f"{name}, fold{number}" for name in study.names for number in range(2)]
    for words in (["view", str(out)], ["test", str(out)], ["heatmap", str(out / "run")]):
        assert main(words) == 2
        assert "take one of them, such as" in capsys.readouterr().err
    page = (out / "report.html").read_text()
    assert "Folds, full resolution" in page and "Folds, thumbnail" in page and "Difference, paired by slide" in page
    assert yaml.safe_load((out / "thumbnail" / "config.yaml").read_text())["data"]["downsample"] == 8


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--compare=thumbnail"], "--compare thumbnail shrinks whole images"),
        (["--compare=frozen", "--model.finetune=none"], "model.finetune is none, which is what --compare frozen"),
        (["--compare=frozen", "--model.pretrained=null"], "--compare frozen needs model.pretrained"),
        (["--compare=frozen", "--data.patches=null"], "--compare frozen needs data.patches"),
        (["--compare=frozen", "--train.devices=2"], "train.devices is 2, and a comparison measures one process"),
        (["--compare=frozen", "--resume=best"], "a comparison continues with --resume last"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    config: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", f"--config={config}", *more]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
