"""Features written here are those of the encoder; heads are trained on files of this and other programs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import yaml
import zarr

from lightning_plugin import LazyImage, TiledModule
from tests.exactness import TOLERANCE, difference
from tests.wsi_trainer.fit.whole_bags import SIZE, resnet
from wsi_trainer.cli import main
from wsi_trainer.data.datamodule import SlideData
from wsi_trainer.data.dataset import DataConfig
from wsi_trainer.data.features import FeatureSource, check_one_each, features_of
from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.data.patches import PatchConfig, open_bag
from wsi_trainer.embed import Embedder
from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.fit.run import Run
from wsi_trainer.io.files import read_json
from wsi_trainer.models import AttentionPooling, FrozenFeatures, PatchEncoder, ResNet, SlideClassifier
from wsi_trainer.slide.slide import Slide
from wsi_trainer.store.convert import Job, Settings, convert
from wsi_trainer.synthetic import SlideSpec, write_slide

BATCH = 4


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small slides, as stores, and the weights of an encoder."""
    folder = tmp_path_factory.mktemp("embed")
    for number in range(2):
        spec = SlideSpec(190 + 20 * number, 230, seed=2, slide=number, patient=number, positive=bool(number))
        write_slide(folder / f"s{number}.tif", spec)
        convert(Job(folder / f"s{number}.tif", f"s{number}"), folder, Settings(chunk=64, shard=256))
    (folder / "manifest.csv").write_text("slide\ns0.zarr\ns1.zarr\n")
    torch.manual_seed(3)
    torch.save(ResNet((4, 8), norm="group").state_dict(), folder / "encoder.pt")
    return folder


@pytest.fixture
def config(slides: Path, tmp_path: Path) -> Path:
    content = {
        "model": {"backbone": resnet(4, 8), "pretrained": str(slides / "encoder.pt")},
        "data": {"manifest": str(slides / "manifest.csv"), "patches": {"size": SIZE, "min_tissue": 0.3}},
        "train": {"accelerator": "cpu", "precision": "32-true"},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def run(config: Path, out: Path, *words: str) -> int:
    return main(["embed", f"--config={config}", f"--out={out}", f"--batch={BATCH}", *words])


def test_features_are_those_of_the_encoder_at_the_places_that_the_file_says(
    slides: Path, config: Path, tmp_path: Path
) -> None:
    assert run(config, tmp_path / "out") == 0
    model = SlideClassifier(backbone=PatchEncoder(ResNet((4, 8), norm="group"), SIZE), pretrained=slides / "encoder.pt")
    model.load_pretrained()
    model.eval()
    for number in range(2):
        pixels = torch.from_numpy(zarr.open_array(slides / f"s{number}.zarr" / "0", mode="r")[:])
        with h5py.File(tmp_path / "out" / f"s{number}.h5") as file:
            features, coords, said = file["features"][:], file["coords"][:], dict(file["coords"].attrs)
            assert file["features"].attrs["sha256"] == hashlib.sha256(features.tobytes()).hexdigest()
        assert features.dtype == np.float32 and coords.dtype == np.int64 and len(features) == len(coords) > BATCH
        patches = torch.stack([pixels[:, y : y + SIZE, x : x + SIZE] for x, y in coords])
        with torch.no_grad():
            expected = model.backbone(model.normalise(patches))[0, :, :, 0].T
        np.testing.assert_allclose(features, expected, atol=1e-5)
        assert said["patch_size_level0"] == said["patch_size"] == SIZE and said["overlap"] == 0
        assert (said["level0_height"], said["level0_width"]) == pixels.shape[1:]
        assert said["level0_magnification"] == said["target_magnification"] == 20
        assert said["name"] == f"s{number}"
    assert [path.name for path in (tmp_path / "out").glob(".*")] == [".staging"], "nothing but locks is left"


def test_a_slide_that_was_cut_short_is_made_again_and_those_before_are_kept(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(config, tmp_path / "once") == 0
    original = Embedder._batches
    slides = 0

    def dying(self: Embedder, bag: Any) -> Iterator[np.ndarray]:
        nonlocal slides
        slides += 1
        for number, batch in enumerate(original(self, bag)):
            if slides == 2 and number == 1:
                raise KeyboardInterrupt
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(Embedder, "_batches", dying)
        assert run(config, tmp_path / "often") != 0
    assert [path.name for path in (tmp_path / "often").glob("*.h5")] == ["s0.h5"]
    capsys.readouterr()
    assert run(config, tmp_path / "often") == 0
    assert "features of 2 slides, 1 of them kept" in capsys.readouterr().out
    for number in range(2):
        files = [tmp_path / folder / f"s{number}.h5" for folder in ("once", "often")]
        assert files[0].read_bytes() == files[1].read_bytes()
    assert [path.name for path in (tmp_path / "often").glob(".*")] == [".staging"]


def test_other_weights_do_not_mix_into_a_folder(
    slides: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(config, tmp_path / "out") == 0
    torch.manual_seed(4)
    torch.save(ResNet((4, 8), norm="group").state_dict(), tmp_path / "other.pt")
    assert run(config, tmp_path / "out", f"--model.pretrained={tmp_path / 'other.pt'}") == 2
    assert "s0.h5 was made with another encoder or other weights" in capsys.readouterr().err
    assert run(config, tmp_path / "out", "--model.pretrained=null") == 2
    assert "features of an encoder with random weights say nothing" in capsys.readouterr().err


@pytest.mark.slow
def test_what_a_folder_holds_is_what_would_be_made(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a slide that was scanned again, of other patches: a file is not kept as if it were right."""
    slide, out = tmp_path / "s.tif", tmp_path / "out"
    write_slide(slide, SlideSpec(150, 130, seed=5, slide=0, patient=0, positive=False))
    (tmp_path / "one.csv").write_text("slide\ns.tif\n")
    words = (f"--data.manifest={tmp_path / 'one.csv'}", "--data.patches.over=slide")
    assert run(config, out, *words) == 0
    assert run(config, out, *words, "--batch=7") == 0, "what does not matter may differ"
    for other in ("--data.patches.stride=24", "--data.patches.mpp=1.0", "--train.precision=bf16-mixed"):
        assert run(config, out, *words, other) == 2
        assert "s.h5 was made of other pixels, of other patches or in another" in capsys.readouterr().err
    write_slide(slide, SlideSpec(150, 130, seed=6, slide=0, patient=0, positive=False))
    assert run(config, out, *words) == 2
    before = (out / "s.h5").read_bytes()
    (out / "s.h5").unlink()
    assert run(config, out, *words) == 0
    assert (out / "s.h5").read_bytes() != before


def test_an_encoder_that_a_run_has_trained(slides: Path, config: Path, tmp_path: Path) -> None:
    model = SlideClassifier(backbone=PatchEncoder(ResNet((4, 8), norm="group"), SIZE), pretrained=slides / "encoder.pt")
    model.load_pretrained()
    torch.save({"state_dict": model.state_dict()}, tmp_path / "best.ckpt")
    assert run(config, tmp_path / "file") == 0
    words = (f"--checkpoint={tmp_path / 'best.ckpt'}", "--model.pretrained=null")
    assert run(config, tmp_path / "run", *words) == 0
    assert (tmp_path / "file" / "s1.h5").read_bytes() == (tmp_path / "run" / "s1.h5").read_bytes()


def test_the_layout_of_stamp_counts_in_micrometres(config: Path, tmp_path: Path) -> None:
    assert run(config, tmp_path / "pixels") == run(config, tmp_path / "um", "--layout=stamp") == 0
    with h5py.File(tmp_path / "pixels" / "s1.h5") as ours, h5py.File(tmp_path / "um" / "s1.h5") as theirs:
        np.testing.assert_array_equal(ours["features"], theirs["feats"])
        np.testing.assert_allclose(theirs["coords"], ours["coords"][:] * 0.5)
        assert theirs.attrs["unit"] == "um" and theirs.attrs["tile_size_px"] == SIZE
        assert theirs.attrs["tile_size_um"] == SIZE * 0.5


@pytest.mark.parametrize("layout", ["trident", "stamp"])
@pytest.mark.parametrize("mpp", ["0.5", "0.8"])
def test_features_keep_the_places_of_their_patches(
    layout: str, mpp: str, slides: Path, config: Path, tmp_path: Path
) -> None:
    """They are those of the bag, in the same order, and say where a bag of the same patches would be cut."""
    words = [f"--layout={layout}", f"--data.patches.mpp={mpp}", "--data.patches.min_tissue=0"]
    assert run(config, tmp_path / "out", *words) == 0
    for name in ("s0", "s1"):
        bag = open_bag(Slide.open(slides / f"{name}.zarr"), PatchConfig(size=SIZE, mpp=float(mpp), min_tissue=0))
        source = FeatureSource(tmp_path / "out" / f"{name}.h5")
        assert len(source.places) == source.shape[2] == bag.shape[0]
        found = source.places.in_pixels(bag.place.mpp)
        assert not found.micrometres and found.side == pytest.approx(bag.places.side, abs=0.5)
        np.testing.assert_allclose(found.points, bag.places.points, atol=0.51)
        np.testing.assert_allclose(found.positions(bag.place, bag.size, SIZE), bag.positions, atol=1)
        if mpp == "0.5":
            np.testing.assert_array_equal(found.points, bag.places.points)


def test_places_of_other_programs(tmp_path: Path) -> None:
    """TRIDENT says a side, CLAM's files of features do not, STAMP counts in micrometres, CLAM's tensors have none."""
    points = np.array([[x, y] for y in (7, 231, 455) for x in (100, 324, 548)] + [[2001, 3001]])
    rows = np.zeros((10, 4), np.float32)

    def write(name: str, coords: np.ndarray, key: str = "features", **attributes: object) -> FeatureSource:
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file[key] = rows
            file["coords"] = coords
            (file if "unit" in attributes else file["coords"]).attrs.update(attributes)
        return FeatureSource(tmp_path / f"{name}.h5")

    trident = write("trident", points, patch_size_level0=448, level0_width=5000, level0_height=4000).places
    assert trident.side == 448 and trident.slide == (4000, 5000)
    clam = write("clam", points).places
    assert clam.side == 224 and clam.slide is None
    for size in ("tile_size_um", "tile_size"):
        stamp = write("stamp", points * 0.25, "feats", unit="um", **{size: 56.0}).places
        assert stamp.micrometres and stamp.side == 56
        found = stamp.in_pixels((0.25, 0.25))
        assert found.side == 224
        np.testing.assert_array_equal(found.points, points)
        with pytest.raises(SlideError, match=r"counts in micrometres.*fill in the manifest's column mpp"):
            stamp.in_pixels(None)
    np.testing.assert_array_equal(write("batched", points[None]).places.points, points)
    with pytest.raises(SlideError, match="has 10 features and 9 coords"):
        _ = write("other", points[:9]).places
    with pytest.raises(SlideError, match="no two of them are in one row"):
        _ = write("scattered", np.arange(20).reshape(10, 2)).places
    torch.save(torch.from_numpy(rows), tmp_path / "t.pt")
    with pytest.raises(SlideError, match=r"has features and no places; take CLAM's h5_files"):
        _ = FeatureSource(tmp_path / "t.pt").places


def write_as(program: str, folder: Path, name: str, rows: np.ndarray) -> None:
    """A file of features as another program writes it."""
    if program == "CLAM's tensors":
        torch.save(torch.from_numpy(rows), folder / f"{name}.pt")
        return
    with h5py.File(folder / f"{name}.h5", "w") as file:
        if program == "CLAM":  # appended batch by batch, a row in a chunk
            width = rows.shape[1]
            made = file.create_dataset("features", rows.shape, "f4", maxshape=(None, width), chunks=(1, width))
            made[:] = rows
        elif program == "TRIDENT":
            file.create_dataset("features", data=rows.astype(np.float16))
        elif program == "one bag":
            file.create_dataset("features", data=rows[None])
        else:
            file.create_dataset("feats", data=rows)
            file.attrs["unit"] = "um"
        file.create_dataset("coords", data=np.zeros((len(rows), 2), np.int64))


def record(slide: Path | str) -> SlideRecord:
    return SlideRecord(str(slide), Path(slide), "", "", "")


PROGRAMS = ("CLAM", "CLAM's tensors", "TRIDENT", "STAMP", "one bag")


@pytest.mark.parametrize("program", PROGRAMS)
def test_files_of_other_programs_are_read_and_a_head_is_trained_in_tiles_as_whole(program: str, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(11, 6)).astype(np.float16).astype(np.float32)
    write_as(program, tmp_path, "slide", rows)
    source = FeatureSource(features_of(tmp_path, record("elsewhere/slide.svs")))
    assert source.shape == (1, 6, 11, 1)
    torch.manual_seed(0)
    model = SlideClassifier(backbone=FrozenFeatures(6), head=AttentionPooling).double()
    expected = model(torch.from_numpy(rows.T[None, :, :, None].copy()))
    actual = TiledModule(model, tiles=(4, 1))(LazyImage(source))
    assert difference(actual.sum(), expected.sum()) < TOLERANCE


@pytest.mark.slow
def test_fit_trains_a_head_on_features_and_needs_no_slides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator = np.random.default_rng(0)
    (tmp_path / "features").mkdir()
    lines = ["slide,label,split"]
    for number in range(12):
        rows = generator.normal(size=(20, 6)).astype(np.float32)
        rows[:5] += 4 * (number % 2)
        write_as(PROGRAMS[number % 5], tmp_path / "features", f"s{number}", rows)
        lines.append(f"s{number}.svs,{number % 2},{('train', 'train', 'val', 'test')[number // 3]}")
    (tmp_path / "manifest.csv").write_text("\n".join(lines) + "\n")
    backbone = {"class_path": "wsi_trainer.models.FrozenFeatures", "init_args": {"width": 6}}
    content = {
        "out": str(tmp_path / "run"),
        "model": {"backbone": backbone, "head": "wsi_trainer.models.AttentionPooling", "learning_rate": 0.05},
        "data": {"manifest": str(tmp_path / "manifest.csv"), "features": str(tmp_path / "features")},
        "train": {"epochs": 8, "accelerator": "cpu", "resamples": 20, "loggers": ["csv"], "budget": "64MiB"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    words = [f"--config={tmp_path / 'config.yaml'}"]
    assert main(["fit", *words]) == 0
    scores = read_json(Run(tmp_path / "run").evaluation("test"))
    assert scores["slide"]["auc"]["value"] == 1.0
    capsys.readouterr()
    assert main(["fit", *words, f"--out={tmp_path / 'other'}", "--model.backbone.init_args.width=7"]) == 2
    assert "has 6 for each patch, and model.backbone.width is 7" in capsys.readouterr().err


def test_slides_of_one_name_do_not_share_a_file(
    slides: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither when features are written, nor when a head is trained on them."""
    paths = [tmp_path / folder / "s.tif" for folder in ("first", "second")]
    for seed, path in enumerate(paths):
        path.parent.mkdir()
        write_slide(path, SlideSpec(150, 130, seed=seed, slide=0, patient=0, positive=False))
    (tmp_path / "both.csv").write_text("slide,label,split\nfirst/s.tif,0,train\nsecond/s.tif,1,val\n")
    words = (f"--data.manifest={tmp_path / 'both.csv'}", "--data.patches.over=slide")
    assert run(config, tmp_path / "out", *words) == 2
    assert "s.h5 was made of other pixels" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"first/s\.tif and .*second/s\.tif would both have the features s\.h5"):
        check_one_each(tmp_path / "out", [record(path) for path in paths])
    data = DataConfig(manifest=tmp_path / "both.csv", features=tmp_path / "out")
    with pytest.raises(UserError, match="would both have the features"):
        SlideData(data, ["0", "1"])


def test_a_slide_without_a_file_and_a_file_of_something_else_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.features has none of slide\.h5, slide\.pt"):
        features_of(tmp_path, record("slide.svs"))
    with h5py.File(tmp_path / "slide.h5", "w") as file:
        file["coords"] = np.zeros((3, 2))
    with pytest.raises(UserError, match=r"has none of features, feats, patch_embeddings; it has coords"):
        FeatureSource(tmp_path / "slide.h5")
