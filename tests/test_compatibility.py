"""Files that earlier versions wrote are read, and give the numbers that they gave then (docs/stability.md)."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any, cast

import h5py
import numpy as np
import pytest
import torch
from pytorch_lightning.utilities import move_data_to_device
from torch.utils.data import DataLoader

from lightning_plugin import Box, Plan, TiledModule
from wsi_trainer.cli import COMMANDS, main
from wsi_trainer.data.features import FeatureSource
from wsi_trainer.data.manifest import read_manifest
from wsi_trainer.fit.run import Run
from wsi_trainer.metrics import read_predictions
from wsi_trainer.models import VGG, BinaryTask, ModelConfig, SegmentationTask, Task, make_model
from wsi_trainer.models.batch import FORMER, make_batch
from wsi_trainer.slide import Slide
from wsi_trainer.synthetic import SlideSpec, write_slide

DATA = Path(__file__).parent / "data"
VERSIONS = ("0.x", "1.0")


pytestmark = pytest.mark.usefixtures("documented_once", "planned_once")


@pytest.fixture(params=VERSIONS)
def old(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of a version, in another folder than they were written in; commands run there."""
    with zipfile.ZipFile(DATA / request.param / "files.zip") as files:
        files.extractall(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def expected(old: Path) -> Any:
    """The numbers that the version which wrote the files read from them."""
    return json.loads((old / "expected.json").read_text())


def network() -> torch.nn.Module:
    spec = importlib.util.spec_from_file_location("make_old", DATA / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.network()


def test_a_plan_gives_the_same_step(expected: Any) -> None:
    plan = Plan.from_json(Path("plan.json").read_text())
    assert (plan.peak_bytes, len(plan.segments)) == (expected["plan"]["peak_bytes"], expected["plan"]["segments"])
    net = network()
    image = torch.rand(1, 3, 256, 192)
    tiled = TiledModule(net, plan=plan)
    loss = tiled(image).square().sum()
    loss.backward()
    assert loss.item() == pytest.approx(expected["plan"]["loss"], rel=1e-5)
    assert tiled.plan.segments == plan.segments


@pytest.mark.parametrize("old", ["1.0"], indirect=True)
def test_a_state_dict_of_a_tiled_module_gives_the_same_loss(expected: Any) -> None:
    net = network()
    image = torch.rand(1, 3, 256, 192)
    for parameter in net.parameters():
        torch.nn.init.zeros_(parameter)
    torch.nn.ModuleDict({"net": net}).load_state_dict(torch.load("weights.pt"))
    assert net(image).square().sum().item() == pytest.approx(expected["plan"]["loss"], rel=1e-5)


def test_a_store_holds_its_pixels_and_is_verified(expected: Any) -> None:
    with Slide.open(Path("stores/s4.zarr")) as slide:
        pixels = slide.read(0, 0, 0, 72, 72)
    assert list(pixels.shape) == expected["store"]["shape"]
    assert int(pixels.sum()) == expected["store"]["sum"]
    assert main(["verify", "stores"]) == 0


def test_features_have_their_values_and_a_head_is_trained_on_them(expected: Any) -> None:
    features = FeatureSource(Path("features/s4.h5"))
    values = features.read(Box((0, 0), features.shape[2:]))[0, :, :, 0].t()
    assert list(values.shape) == expected["features"]["shape"]
    assert values.sum().item() == pytest.approx(expected["features"]["sum"], rel=1e-5)
    words = ["--data.manifest=manifest.csv", "--data.features=features", "--train.accelerator=cpu", "--out=heads"]
    backbone = ["--model.backbone=wsi_trainer.models.FrozenFeatures", "--model.backbone.width=8"]
    assert main(["fit", *words, *backbone, "--train.epochs=1", "--train.budget=null"]) == 0


def test_a_run_predicts_and_scores_as_it_did(old: Path, expected: Any) -> None:
    run = Run.open("run")
    prediction = run.predict("stores/s4.zarr")
    assert prediction == pytest.approx(expected["run"]["prediction"], abs=1e-5)
    scores = run.scores["test"]["slide"]
    assert {name: scores[name]["value"] for name in ("auc", "brier")} == expected["run"]["scores"]


@pytest.mark.slow
def test_a_run_is_tested_reported_and_found_finished(old: Path, expected: Any) -> None:
    root = f"--data-root={old / 'stores'}"
    assert main(["test", "run", root, "--overwrite"]) == 0
    scores = Run.open("run").scores["test"]["slide"]
    assert {name: scores[name]["value"] for name in ("auc", "brier")} == pytest.approx(
        expected["run"]["scores"], abs=1e-5
    )
    assert main(["report", "run", root]) == 0
    assert main(["fit", "run", "--data.manifest=manifest.csv", "--data.stores=stores"]) == 0


def write_slides() -> None:
    """Write the slides that the stores were made from, which are not kept."""
    Path("slides").mkdir()
    for number in range(1, 7):
        spec = SlideSpec(64 + 8 * number, 72, seed=3, slide=number, patient=number, positive=bool(number % 2))
        write_slide(Path("slides") / f"s{number}.tif", spec)
    shutil.copyfile("manifest.csv", "slides/manifest.csv")


@pytest.mark.slow
@pytest.mark.parametrize("old", ["1.0"], indirect=True)
def test_stores_features_predictions_and_maps_are_what_1_0_made(old: Path) -> None:
    """`maps.npz` has those that 1.0 made of the run's test slides."""
    write_slides()
    assert main(["preprocess", "slides/manifest.csv", "anew", "--levels=2", "--workers=1"]) == 0
    chunks = [path.relative_to("stores") for path in Path("stores").glob("*.zarr/**/c/**/*") if path.is_file()]
    assert len(chunks) == 24
    assert all((Path("anew") / chunk).read_bytes() == (Path("stores") / chunk).read_bytes() for chunk in chunks)
    assert main(["embed", "--config=embed.yaml", "--out=anew features"]) == 0
    for path in sorted(Path("features").glob("*.h5")):
        with h5py.File(path) as before, h5py.File(Path("anew features") / path.name) as now:
            assert (before["coords"][:] == now["coords"][:]).all()
            np.testing.assert_allclose(now["features"][:], before["features"][:], rtol=1e-5, atol=1e-6)
    root = f"--data-root={old / 'stores'}"
    before = read_predictions(Path("run/predictions/test.csv"))
    assert main(["test", "run", root, "--overwrite"]) == 0
    now = read_predictions(Path("run/predictions/test.csv"))
    assert (now.slides, now.patients) == (before.slides, before.patients)
    for name, column in before.columns().items():
        assert list(now.columns()[name]) == pytest.approx(list(column), abs=1e-6)
    for method in ("activation", "gradient", "attention"):
        assert main(["heatmap", "run", root, f"--method={method}", "--top=0", "--tiles=0"]) == 0
    with np.load(DATA / "1.0" / "maps.npz") as maps:
        for name, values in maps.items():
            np.testing.assert_allclose(np.load(f"run/heatmaps/{name}.npy"), values, rtol=1e-5, atol=1e-7)


def test_slides_of_a_run_are_known_again_by_their_files(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run knows its stores, and of the slides that these were made from a hash of all bytes."""
    write_slides()
    for number in range(1, 7):
        shutil.copyfile(f"slides/s{number}.tif", f"slides/copy {number}.tif")
    Path("copies.csv").write_text("slide,path\n" + "".join(f"c{n},slides/copy {n}.tif\n" for n in range(1, 7)))
    copies = read_manifest(Path("copies.csv"), labelled=False)
    assert [record.slide for record in Run(Path("run")).unseen(copies)] == ["c5", "c6"]
    capsys.readouterr()
    assert main(["preprocess", "slides/manifest.csv", "stores", "--levels=2", "--workers=1"]) == 0
    assert "6 converted (0 now), 0 failed" in capsys.readouterr().out


@pytest.mark.parametrize("task", [BinaryTask(), SegmentationTask(["a", "b"], auxiliary=BinaryTask())])
def test_batches_have_the_keys_of_1_0_and_are_taken_with_them(task: Task) -> None:
    """As a callback reads them, from a worker and after Lightning has moved them, and as a program makes them."""
    torch.manual_seed(0)
    model = make_model(ModelConfig(backbone=VGG((4,), convs=1), task=task))
    label, image = torch.tensor([1]), torch.rand(1, 3, 16, 16)
    drawn = torch.ones(1, 1, 16, 16, dtype=torch.uint8)
    names = list(model.task.by_target)
    targets = {names[-1]: label} if len(names) == 1 else {names[1]: label, names[0]: drawn}
    loader = DataLoader([make_batch(image, targets, "s")], batch_size=None, num_workers=1)  # type: ignore[arg-type]
    (batch,) = loader
    moved: Any = move_data_to_device(batch, torch.device("cpu"))
    former: dict[str, Any] = {"image": image, "slide": "s", "label": label if len(names) == 1 else drawn}
    former |= {} if len(names) == 1 else {"auxiliary": label}
    for key in set(FORMER) & set(former):
        with pytest.warns(DeprecationWarning):
            assert moved[key].equal(former[key])
    with pytest.raises(KeyError):
        moved["labels"]
    with pytest.warns(DeprecationWarning, match="version 2 removes 'label'"):
        loss = model._loss(cast(Any, former))
    assert loss.equal(model._loss(moved))
    assert model.training_step(moved, 0) is not None


@pytest.mark.slow
@pytest.mark.parametrize("old", ["1.0"], indirect=True)
def test_plans_of_another_format_in_a_checkpoint_are_made_again(old: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = torch.load("run/checkpoints/last.ckpt", weights_only=False)
    text = json.dumps(json.loads(Path("plan.json").read_text()) | {"version": 2})
    strategy = kept["lightning_plugin"]
    assert strategy["plans"]
    strategy["plans"] = {key: [text] for key in strategy["plans"]}
    torch.save(kept, "other.ckpt")
    words = ["--config=config.yaml", "--resume=other.ckpt", "--train.epochs=2"]
    assert main(["fit", *words, "--out=further"]) == 0
    assert "the checkpoint's plans are made again" in caplog.text


@pytest.mark.slow
def test_a_checkpoint_goes_on_and_a_config_begins_a_run(old: Path) -> None:
    assert main(["fit", "--config=config.yaml", "--out=anew"]) == 0
    assert (
        main(["fit", "--config=config.yaml", "--out=further", "--resume=run/checkpoints/last.ckpt", "--train.epochs=2"])
        == 0
    )
    kept = torch.load("further/checkpoints/last.ckpt", weights_only=False)
    assert kept["epoch"] == 1 and kept["global_step"] == 4


def public_names() -> dict[str, list[str]]:
    """Names that 1.x keeps: of the modules in the reference that say what they export, and of the commands."""
    engine = ("lightning_plugin", "lightning_plugin.options", "lightning_plugin.plan", "lightning_plugin.strategy")
    modules = (*engine, "wsi_trainer.models", "wsi_trainer.slide")
    found = {name: sorted(importlib.import_module(name).__all__) for name in modules}
    return found | {"wsi-train": sorted(command.name for command in COMMANDS if command.target)}


def test_names_of_1_0_are_there() -> None:
    there = public_names()
    for place, names in json.loads((DATA / "1.0" / "names.json").read_text()).items():
        assert set(names) <= set(there[place]), f"{place}: a public name is gone (docs/stability.md)"
