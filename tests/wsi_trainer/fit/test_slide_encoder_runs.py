"""A run with a slide encoder: weights from a file, places of patches from bags and files of features."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import h5py
import pytest
import torch

from tests.wsi_trainer.fit.feature_cohort import WIDTH, words, write_features
from wsi_trainer.cli import main
from wsi_trainer.data.dataset import DataConfig, SlideDataset, Visit, dense
from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.data.patches import PatchConfig
from wsi_trainer.fit.run import Run
from wsi_trainer.models import Titan
from wsi_trainer.models.slide_encoders import published
from wsi_trainer.neighbours.encoders import SlideFeatures
from wsi_trainer.slide.augment import Augmenter
from wsi_trainer.synthetic import SlideSpec, write_slide

SMALL = "{name: titan, width: 8, depth: 1, heads: 2, pool_heads: 2}"


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_features(tmp_path_factory.mktemp("cohort"))
    for path in (folder / "features").iterdir():
        with h5py.File(path, "a") as file:
            file["coords"].attrs["patch_size_level0"] = 64
    return folder


def test_a_frozen_slide_encoder_is_read_from_a_file_and_predicts_as_it_was_trained(
    cohort: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(published, "SLIDE_ENCODERS", ())  # this one is smaller than the published one
    torch.manual_seed(0)
    head = Titan(WIDTH, width=8, depth=1, heads=2, pool_heads=2)
    state = {f"vision_encoder.{name}": value for name, value in head.state_dict().items()}
    torch.save(state, cohort / "titan.pt")
    more = [f"--model.head={SMALL}", f"--model.head_pretrained={cohort / 'titan.pt'}", "--model.finetune_head=none"]
    assert main(["fit", *words(cohort, cohort / "run", *more)]) == 0
    run, said = Run.open(cohort / "run"), " ".join(capsys.readouterr().out.split())
    assert f"{len(state)} of the network's {len(state)} tensors loaded" in said
    assert json.loads(run.head_pretrained.read_text())["missing"] == []
    model = run.predictor.model
    assert all(torch.equal(value, head.state_dict()[name]) for name, value in model.head.state_dict().items())
    record = next(r for r in run.predictor.loaded.data.records() if r.slide == "s20.svs")
    with run.predictor.opened(record) as (batch, view), torch.no_grad():
        assert batch["places"][0, :, :3, 0].tolist() == [[0.0, 1.0, 2.0]] * 2
        whole = dense(view)
        expected = model(whole, places=batch["places"])
        torch.testing.assert_close(model(whole, places=10 + batch["places"]), expected, msg="the grid may lie anywhere")
        assert not torch.allclose(model(whole, places=2 * batch["places"]), expected)
        shares = model.scores(whole, places=batch["places"]).flatten().softmax(0)
        torch.testing.assert_close(torch.as_tensor(run.predictor.attention(batch, view).weights), shares)
        theirs = {"features": whole[0, :, :, 0].t(), "coords": 64 * batch["places"][0, :, :, 0].t()[None]}
        vector = SlideFeatures(run.predictor, "prediction")({**theirs, "attributes": {"patch_size_level0": 64}})
    torch.testing.assert_close(vector, model.task.predict(expected))


def test_features_whose_file_says_no_places_are_refused_by_name(tmp_path: Path) -> None:
    cohort = write_features(tmp_path)
    torch.save(torch.randn(5, WIDTH), cohort / "features" / "s0.pt")
    (cohort / "features" / "s0.h5").unlink()
    config = DataConfig(manifest=cohort / "manifest.csv", features=cohort / "features")
    dataset = SlideDataset(config.records()[:2], None, config, dense, places=True)
    assert "has features and no places; take CLAM's h5_files" in dataset[Visit(0, 0)]["failure"]
    assert "says nothing of the size of its patches" in dataset[Visit(1, 0)]["failure"]


def test_the_places_of_a_bag_are_those_of_its_grid_also_where_patches_are_moved(tmp_path: Path) -> None:
    write_slide(tmp_path / "a.tif", SlideSpec(900, 700, seed=4, tissue=0.3))
    config = DataConfig(manifest=tmp_path, patches=PatchConfig(size=64, mpp="own", over="slide", shift=5))
    record = SlideRecord("a.tif", tmp_path / "a.tif", "", "", None)
    plain, moved = (
        SlideDataset([record], None, config, dense, augmenter, places=True)[Visit(0, 0)]
        for augmenter in (None, Augmenter(0, True, 5))
    )
    assert set(map(tuple, plain["places"][0, :, :, 0].t().tolist())) == set(product(range(10), range(14)))
    assert torch.equal(plain["places"], moved["places"]) and not torch.equal(plain["image"], moved["image"])
