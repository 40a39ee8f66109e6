"""`data.group: patient` through `fit`: a step is plain PyTorch on all patches of a patient's slides."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from tests.wsi_trainer.fit.whole_bags import SIZE, resnet, train_whole, whole_bag
from wsi_trainer.cli import main
from wsi_trainer.fit.run import Run
from wsi_trainer.metrics import ClassPredictions
from wsi_trainer.models import AttentionPooling, PatchEncoder, ResNet, SlideClassifier

STRIDE = 79  # nine patches of each slide: two plans serve all patients
PATIENTS = {"ann": (0, 3), "bob": (1,), "cyd": (2, 4), "dee": (5, 6)}
SPLITS = {"ann": "train", "bob": "train", "cyd": "val", "dee": "test"}


@pytest.fixture
def config(bag_stores: Path, tmp_path: Path) -> Iterator[Path]:
    lines = ["slide,label,patient,split"]
    for number, (patient, slides) in enumerate(PATIENTS.items()):
        lines += [f"{bag_stores}/s{slide}.zarr,{number % 2},{patient},{SPLITS[patient]}" for slide in slides]
    (tmp_path / "manifest.csv").write_text("\n".join(lines) + "\n")
    content = {
        "out": str(tmp_path / "run"),
        "model": {"backbone": resnet(4), "head": "wsi_trainer.models.AttentionPooling", "learning_rate": 0.01},
        "data": {
            "manifest": str(tmp_path / "manifest.csv"),
            "group": "patient",
            "flip_rotate": False,
            "patches": {"size": SIZE, "stride": STRIDE, "over": "slide", "flip_rotate": False},
        },
        "train": {"epochs": 2, "accelerator": "cpu", "precision": "64-true", "resamples": 20, "loggers": ["csv"]},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    yield path


def test_a_patient_is_one_bag_one_label_and_one_prediction(
    bag_stores: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", f"--config={config}", "--train.budget=1500KiB"]) == 0
    run = Run(tmp_path / "run")
    bags = {
        patient: torch.cat([whole_bag(bag_stores / f"s{slide}.zarr", SIZE, STRIDE, share=0) for slide in slides])
        for patient, slides in PATIENTS.items()
    }
    assert f"the largest has {max(len(bags['ann']), len(bags['bob']))} patches" in capsys.readouterr().out
    torch.manual_seed(0)  # train.seed
    encoder = PatchEncoder(ResNet((4,), norm="group"), SIZE)
    model = SlideClassifier(backbone=encoder, head=AttentionPooling).double().train()
    train_whole(model, [bags["ann"], bags["bob"]], [0, 1], 2, rate=0.01)
    trained = torch.load(run.checkpoint("last"), weights_only=True)["state_dict"]
    for name, value in model.state_dict().items():
        if name != "seen":
            torch.testing.assert_close(trained[name].double(), value.double(), rtol=1e-8, atol=1e-8, msg=name)

    predicted = ClassPredictions.read(run.predictions("test"))
    assert predicted.slides == predicted.patients == ("dee",)
    model.load_state_dict(torch.load(run.checkpoint("best"), weights_only=True)["state_dict"])
    with torch.no_grad():
        said = model.task.predict(model.eval()(bags["dee"]))
    np.testing.assert_allclose(predicted.probabilities, said.numpy(), atol=1e-8)
    assert main(["report", str(run.path)]) == 0 and "dee" in run.report.read_text()
    assert main(["predict", str(run.path), str(tmp_path / "manifest.csv"), "--name=all"]) == 0
    with (run.path / "cohorts" / "all" / "predictions.csv").open() as file:
        assert [row["slide"] for row in csv.DictReader(file)] == list(PATIENTS)
