"""Maps of runs on features: each patch is painted where its file says, also where the slide is absent."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

from tests.wsi_trainer.fit.whole_bags import SIZE
from wsi_trainer.cli import main
from wsi_trainer.data.dataset import dense
from wsi_trainer.data.features import FeatureSource
from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.data.patches import PatchConfig, open_bag
from wsi_trainer.explain.laid_patches import LaidPatches
from wsi_trainer.fit.run import Run
from wsi_trainer.slide.slide import Slide
from wsi_trainer.synthetic import SlideSpec, write_slide
from wsi_trainer.view.contents import contents_of
from wsi_trainer.view.scene import Scene

PATCHES = PatchConfig(size=SIZE, mpp=1.0, min_tissue=0.3)
"""The slides have 0.5 µm a pixel, so a patch has twice as many pixels of them."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slides, features that are the mean colours of their patches, and a run on these."""
    folder = tmp_path_factory.mktemp("maps")
    rows = ["slide,label,split"]
    for number, split in enumerate(("train", "train", "val", "test")):
        path = folder / f"s{number}.tif"
        write_slide(path, SlideSpec(400, 460, seed=2, slide=number, patient=number, positive=bool(number % 2)))
        rows.append(f"{path.name},{number % 2},{split}")
        with Slide.open(path) as slide, h5py.File(folder / f"s{number}.h5", "w") as file:
            bag = open_bag(slide, PATCHES)
            file["features"] = dense(bag).float().mean(dim=(2, 3)) / 255
            file["coords"] = bag.places.points.astype(np.int64)
            about = {"patch_size": SIZE, "patch_size_level0": 2 * SIZE, "level0_height": 400, "level0_width": 460}
            file["coords"].attrs.update(about)
    (folder / "manifest.csv").write_text("\n".join(rows) + "\n")
    words = [f"--data.manifest={folder / 'manifest.csv'}", f"--data.features={folder}", f"--out={folder / 'run'}"]
    words += ["--model.backbone={name: features, width: 3}", "--model.head=abmil", "--train.loggers=[csv]"]
    assert main(["fit", *words, "--train.epochs=1", "--train.resamples=20", "--train.accelerator=cpu"]) == 0
    return folder


@pytest.mark.slow
def test_patches_are_painted_where_the_file_says_and_the_slide_shows_them(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, slide = Run.open(trained / "run"), trained / "s3.tif"
    assert main(["heatmap", str(run.path), "--method=attention", "--top=2"]) == 0
    maps = run.maps("attention")
    (entry,) = json.loads((maps / "heatmaps.json").read_text())["slides"].values()
    values = np.load(maps / entry["array"])
    said = run.attention(trained / "s3.h5")
    expected = np.zeros_like(values)
    rows, columns = (said.places.points[:, ::-1] // (2 * SIZE)).astype(int).T
    expected[rows, columns] = said.weights
    assert len(said.weights) > 8 and entry["stride"] == SIZE and entry["place"]["scale"] == [2, 2]
    np.testing.assert_allclose(values, expected, rtol=1e-5)
    first = int(said.weights.argmax())
    top = entry["top"][0]
    assert [top["x"], top["y"], top["width"]] == [*said.places.points[first].tolist(), 2 * SIZE]
    with Slide.open(slide) as opened:
        patch = dense(open_bag(opened, PATCHES))[first].permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(np.asarray(Image.open(maps / top["picture"])), patch)
    assert Image.open(maps / entry["sheet"]).width > Image.open(maps / top["picture"]).width
    drawn, bare = np.asarray(Image.open(maps / entry["picture"])), Slide.open(slide).thumbnail(512)
    assert drawn.shape[0] > bare.shape[0] and drawn.shape[1] == bare.shape[1], "a bar of colours lies below"
    assert np.ptp(drawn[2, 2].astype(int)) == 0, "no colour where no patch lies"
    scene = Scene(contents_of(run.path))
    number = next(i for i, one in enumerate(scene.contents.slides) if one.name == "s3.tif")
    x, y = (said.places.points[first] + SIZE).astype(int).tolist()
    assert scene.at(number, "0", x, y)["value"] == pytest.approx(float(said.weights[first]), rel=1e-5)
    scene.close()
    assert main(["heatmap", str(run.path)]) == 0, "another method leaves these maps"
    assert main(["report", str(run.path)]) == 0 and (maps / entry["picture"]).is_file()
    assert main(["heatmap", str(run.path), "--method=gradient"]) == 2
    assert "of pixels" in capsys.readouterr().err
    last = run.checkpoint_path("last")
    for command in (["test"], ["heatmap", "--method=attention", "--top=0"]):
        assert main([*command[:1], str(run.path), "--checkpoint=last", *command[1:]]) == 0
    assert main(["report", str(run.path), f"--baseline={last}"]) == 0
    page = run.report.read_text()
    assert 'title="attention"' in page and 'title="run, last, attention"' in page, "two checkpoints side by side"
    slide.rename(slide.with_suffix(".gone"))
    try:
        assert main(["heatmap", str(run.path), "--method=attention", "--top=2", "--overwrite"]) == 0
        assert "no pictures of patches: s3.tif" in " ".join(capsys.readouterr().out.split())
        (absent,) = json.loads((maps / "heatmaps.json").read_text())["slides"].values()
        np.testing.assert_array_equal(np.load(maps / absent["array"]), values)
        assert "sheet" not in absent and not (maps / entry["sheet"]).exists()
        places = [{key: one[key] for key in one if key != "picture"} for one in entry["top"]]
        assert absent["top"] == places and (maps / absent["picture"]).is_file()
        assert main(["report", str(run.path)]) == 0
    finally:
        slide.with_suffix(".gone").rename(slide)


def test_files_that_say_less_are_painted_too(tmp_path: Path) -> None:
    """CLAM says no size of a patch, STAMP counts in micrometres, and patches may overlap."""
    corners = np.array([[x, y] for y in range(0, 300, 50) for x in range(100, 400, 50)])
    record = SlideRecord("s", tmp_path / "s.svs", "", "s", "", others={"mpp": "0.5"})
    about: dict[str, dict[str, str | float]] = {
        "clam": {},
        "stamp": {"unit": "um", "tile_size_um": 25.0, "tile_size_px": 25},
        "overlap": {"patch_size_level0": 100, "patch_size": 100},
    }
    for name, attributes in about.items():
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["features"] = np.ones((len(corners), 2), np.float32)
            file["coords"] = corners * (0.5 if name == "stamp" else 1)
            (file.attrs if name == "stamp" else file["coords"].attrs).update(attributes)
        laid, image = LaidPatches.of_features(FeatureSource(tmp_path / f"{name}.h5"), record, None)
        assert image is None
        values = torch.arange(1.0, len(corners) + 1)
        found, factor = laid.paint(values).values.numpy(), laid.place.scale[0]
        assert laid.stride * factor == 50 and (found[:, :2] == 0).all(), name
        if name == "overlap":
            assert found[1, 3] == (1 + 2 + 7 + 8) / 4
        else:
            np.testing.assert_array_equal(found[:, 2:], values.reshape(6, 6))
