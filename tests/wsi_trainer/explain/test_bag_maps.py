"""Maps of bags: what each patch adds to the score, painted where the patch lies."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_plugin import LazyImage
from tests.wsi_trainer.fit.whole_bags import SIZE, resnet, write_config
from wsi_trainer.cli import main
from wsi_trainer.data.dataset import dense
from wsi_trainer.data.patches import PatchConfig, open_bag
from wsi_trainer.explain.attribution import attribute
from wsi_trainer.explain.laid_patches import LaidPatches
from wsi_trainer.fit.run import Run
from wsi_trainer.models import AttentionPooling, PatchEncoder, ResNet, SlideClassifier
from wsi_trainer.models.weights import load_weights
from wsi_trainer.slide.formats.base import FILL
from wsi_trainer.slide.slide import Slide
from wsi_trainer.store.convert import Job, Settings, convert
from wsi_trainer.synthetic import SlideSpec, write_slide
from wsi_trainer.view.contents import contents_of
from wsi_trainer.view.scene import Scene


def network(seed: int = 0) -> SlideClassifier:
    torch.manual_seed(seed)
    return SlideClassifier(backbone=PatchEncoder(ResNet((4,), norm="group"), SIZE), head=AttentionPooling)


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("maps")
    for number in range(4):
        spec = SlideSpec(200, 230, seed=2, slide=number, patient=number, positive=bool(number % 2))
        write_slide(folder / f"s{number}.tif", spec)
        convert(Job(folder / f"s{number}.tif", f"s{number}"), folder, Settings(chunk=64, shard=256, levels=2))
    rows = [f"s{number}.zarr,{number % 2},{split}" for number, split in enumerate(("train", "val", "test", "train"))]
    (folder / "manifest.csv").write_text("slide,label,split\n" + "\n".join(rows) + "\n")
    return folder


@pytest.mark.parametrize("method", ["activation", "attention", "gradient"])
def test_each_patch_has_the_value_that_plain_pytorch_gives_it_within_a_budget(method: str) -> None:
    model = network().double().eval()
    bag = torch.randint(0, 256, (11, 3, SIZE, SIZE), dtype=torch.uint8)
    found = attribute(model, LazyImage.from_tensor(bag), 1, method, budget="600KiB")  # type: ignore[arg-type]
    assert found.values.shape == (11, 1)
    x = model.normalise(bag).requires_grad_()
    features = model.backbone(x).requires_grad_()
    features.retain_grad()
    if method == "attention":
        expected = torch.softmax(model.head.scores(features).flatten(), 0)  # type: ignore[operator]
    else:
        logits = model.forward_head(model.head(features))
        (logits[0, -1] if logits.shape[1] == 1 else logits[0, 1] - logits[0, 0]).backward()
        glass = model.normalise(torch.full((1, 3, 1, 1), FILL, dtype=torch.uint8))
        assert features.grad is not None and x.grad is not None
        parts = features * features.grad if method == "activation" else (x - glass) * x.grad
        expected = parts.sum(1).flatten() if method == "activation" else parts.sum((1, 2, 3))
    torch.testing.assert_close(found.values.flatten(), expected.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("stride", "cell"), [(32, 32), (16, 16), (28, 28), (50, 32)])
def test_a_patch_is_painted_where_it_lies(slides: Path, stride: int, cell: int) -> None:
    patches = PatchConfig(size=SIZE, stride=stride, min_tissue=0.3)
    bag = open_bag(Slide.open(slides / "s2.zarr"), patches)
    values = torch.arange(1.0, len(bag.positions) + 1)
    made = LaidPatches.of_bag(bag, patches).paint(values)
    assert made.stride == cell
    found = made.values.numpy()
    total, count = np.zeros((200, 230)), np.zeros((200, 230))
    for value, (y, x) in zip(values.tolist(), bag.positions):
        total[y : y + SIZE, x : x + SIZE] += value
        count[y : y + SIZE, x : x + SIZE] += 1
    for row, column in np.ndindex(*found.shape):
        y, x = row * cell + cell // 2, column * cell + cell // 2
        if y < 200 and x < 230:
            expected = total[y, x] / count[y, x] if count[y, x] else 0.0
            assert found[row, column] == pytest.approx(expected), (row, column)
    assert set(values.tolist()) <= set(found.ravel().tolist()) or stride < SIZE, "each patch is seen"


@pytest.mark.parametrize("kind", ["zarr", pytest.param("tif", marks=pytest.mark.full)])
def test_the_viewer_draws_maps_of_bags_where_their_files_say(slides: Path, tmp_path: Path, kind: str) -> None:
    """Patches have 1 µm a pixel, and the slides 0.5: what a position covers is twice its stride on the slide."""
    manifest = slides / f"{kind}.csv"
    manifest.write_text((slides / "manifest.csv").read_text().replace("zarr", kind))
    patches = {"mpp": 1.0, "over": "slide"}
    config = write_config(tmp_path, manifest, resnet(4), patches=patches, train={"budget": "64MiB"})
    assert main(["fit", f"--config={config}"]) == 0
    assert main(["heatmap", str(tmp_path / "run"), "--method=attention", "--size=64"]) == 0
    maps = Run(tmp_path / "run").maps("attention")
    ((slide, entry),) = json.loads((maps / "heatmaps.json").read_text())["slides"].items()
    scene = Scene(contents_of(tmp_path / "run"))
    number = next(i for i, one in enumerate(scene.contents.slides) if one.name == slide)
    (about,) = scene.about(number)["layers"]
    assert about["stride"] == 2 * SIZE
    assert about["rows"] * 2 * SIZE >= 200 and about["columns"] * 2 * SIZE >= 230, "the map covers the slide"
    values = np.load(maps / entry["array"])
    assert scene.at(number, "0", 100, 70)["value"] == pytest.approx(float(values[1, 1]))
    best = np.unravel_index(values.argmax(), values.shape)
    (top,) = scene.top(number, "0", 1)["places"]
    assert (top["y"], top["x"]) == ((best[0] + 0.5) * 2 * SIZE, (best[1] + 0.5) * 2 * SIZE)
    written = entry["top"][0]
    assert written["x"] <= top["x"] <= written["x"] + written["width"]
    assert written["y"] <= top["y"] <= written["y"] + written["height"]
    drawn = json.loads((maps / entry["outlines"]).read_text())["features"]
    shown = scene.outlines(number, "0", 0.5)["polygons"]
    extents = [np.concatenate([np.array(ring) for ring in one["rings"]]).max(0) for one in shown]
    saved = [np.concatenate([np.array(r) for r in one["geometry"]["coordinates"]]).max(0) for one in drawn]
    assert len(saved) == len(extents) > 0
    np.testing.assert_allclose(np.max(extents, 0), np.max(saved, 0), atol=2)
    scene.close()


@pytest.mark.slow
def test_the_command_writes_maps_of_bags(slides: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    patches = {"min_tissue": 0.3}
    config = write_config(tmp_path, slides / "manifest.csv", resnet(4), patches=patches, train={"budget": "64MiB"})
    assert main(["fit", f"--config={config}"]) == 0
    assert main(["heatmap", str(tmp_path / "run"), "--method=attention", "--size=64"]) == 0
    run = Run(tmp_path / "run")
    (entry,) = json.loads((run.maps("attention") / "heatmaps.json").read_text())["slides"].values()
    values = np.load(run.maps("attention") / entry["array"])
    assert values.shape == (7, 8) and entry["stride"] == SIZE
    model = network()
    load_weights(model, run.checkpoint("best"))
    bag = open_bag(Slide.open(slides / "s2.zarr"), PatchConfig(size=SIZE, min_tissue=0.3))
    with torch.no_grad():
        patches = model.normalise(dense(bag))
        weights = torch.softmax(model.head.scores(model.eval().backbone(patches)).flatten(), 0)  # type: ignore[operator]
    for (y, x), weight in zip(bag.positions // SIZE, weights.tolist()):
        assert values[y, x] == pytest.approx(weight, rel=1e-4)
    assert main(["report", str(run.path)]) == 0
    capsys.readouterr()
    assert main(["heatmap", str(tmp_path / "run"), "--overwrite", "--data.group=patient"]) == 2
    assert "--data.group slide maps each slide by itself" in capsys.readouterr().err
