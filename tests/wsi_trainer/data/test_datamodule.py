"""From files to batches of one slide."""

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch

from lightning_plugin import LazyImage
from wsi_trainer.data.datamodule import SlideData
from wsi_trainer.data.dataset import DataConfig
from wsi_trainer.data.manifest import read_manifest
from wsi_trainer.errors import UserError
from wsi_trainer.models import BinaryTask
from wsi_trainer.slide.slide import Slide
from wsi_trainer.slide.views import Image


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """Twelve small slides of different sizes, each of one colour of its own."""
    lines = ["slide,label,split"]
    for index in range(12):
        pixels = np.full((256 + 16 * index, 320, 3), 10 * index, dtype=np.uint8)
        tifffile.imwrite(tmp_path / f"{index}.tif", pixels, tile=(128, 128), photometric="rgb")
        lines.append(f"{index}.tif,{'ab'[index % 2]},{'train' if index < 8 else 'val'}")
    path = tmp_path / "manifest.csv"
    path.write_text("\n".join(lines))
    return path


def test_a_batch_is_one_slide_with_its_label(manifest: Path) -> None:
    data = SlideData(DataConfig(manifest=manifest), ["a", "b"])
    batches = list(data.val_dataloader())
    assert [batch["slide"] for batch in batches] == [f"{index}.tif" for index in range(8, 12)]
    assert [int(batch["targets"]["label"]) for batch in batches] == [0, 1, 0, 1]
    assert tuple(batches[1]["image"].shape) == (1, 3, 256 + 16 * 9, 320)
    assert batches[1]["image"].dtype == torch.uint8 and (batches[1]["image"] == 90).all()


def test_each_epoch_visits_each_slide_once_in_a_new_order(manifest: Path) -> None:
    data = SlideData(DataConfig(manifest=manifest), ["a", "b"], seed=3)
    loader = data.train_dataloader()
    orders = [[batch["slide"] for batch in loader] for _ in range(3)]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert all(sorted(order) == sorted(orders[0]) and len(set(order)) == 8 for order in orders)


@pytest.mark.parametrize("given", [0, 3, 8])
def test_a_restored_loader_goes_on_where_the_state_was_taken(manifest: Path, given: int) -> None:
    first, second = (SlideData(DataConfig(manifest=manifest), ["a", "b"], seed=3).train_dataloader() for _ in range(2))
    list(first)  # an epoch
    batches = iter(first)
    begun = [next(batches)["slide"] for _ in range(given)]
    state = first.state_dict()
    rest, following = [batch["slide"] for batch in batches], [batch["slide"] for batch in first]
    second.load_state_dict(state)
    again = [[batch["slide"] for batch in second] for _ in range(2)]
    assert again[0] == (following if given == 8 else rest)  # an epoch that was given out whole is over
    assert given == 8 or again[1] == following
    assert len(begun) + len(rest) == 8 and len(second) == 8


def test_training_slides_are_turned_and_others_are_not(manifest: Path) -> None:
    data = SlideData(DataConfig(manifest=manifest), ["a", "b"])
    loader = data.train_dataloader()
    lying = [b["image"].shape[2] == 320 for _ in range(4) for b in loader if b["image"].shape[2] != b["image"].shape[3]]
    assert 0.2 < np.mean(lying) < 0.8
    still = SlideData(DataConfig(manifest=manifest, flip_rotate=False), ["a", "b"])
    assert {b["image"].shape[3] for b in (*still.train_dataloader(), *data.val_dataloader())} == {320}


@pytest.mark.slow
def test_workers_deliver_the_same(manifest: Path) -> None:
    plain = SlideData(DataConfig(manifest=manifest), ["a", "b"])
    parallel = SlideData(DataConfig(manifest=manifest, workers=1), ["a", "b"])
    for one, other in zip(plain.val_dataloader(), parallel.val_dataloader(), strict=True):
        assert one["slide"] == other["slide"] and torch.equal(one["image"], other["image"])


@pytest.mark.slow
def test_workers_import_no_lightning(manifest: Path, tmp_path: Path) -> None:
    """It takes longer than reading many a slide, and each worker is a process of its own."""
    config, task = DataConfig(manifest=manifest, stain=0.1, workers=1), BinaryTask(["a", "b"])
    loader = SlideData(config, task, to_image=LazyImage, tissue_stride=8).train_dataloader()
    given = tmp_path / "given"
    given.write_bytes(pickle.dumps((loader.dataset, loader.collate_fn, loader.worker_init_fn)))
    code = f"""
import pickle, sys
from wsi_trainer.data.dataset import Visit
dataset, collate, _ = pickle.load(open({str(given)!r}, "rb"))
assert collate(dataset[Visit(0, 0)])["slide"] == "0.tif"
print(sorted({{name.partition(".")[0] for name in sys.modules}} & {{"pytorch_lightning", "lightning", "torchmetrics"}}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stdout + done.stderr[-1000:]


def test_an_unreadable_slide_and_bad_settings_are_named(tmp_path: Path) -> None:
    (tmp_path / "broken.svs").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"broken\.svs"):
        Slide.open(tmp_path / "broken.svs")
    with pytest.raises(UserError, match=r"data\.downsample is 0"):
        DataConfig(manifest=tmp_path, downsample=0)
    with pytest.raises(UserError, match=r"data\.validation is 1"):
        DataConfig(manifest=tmp_path, validation=1.0)


def test_balanced_epochs_show_each_class_equally_often(manifest: Path) -> None:
    text = manifest.read_text().replace("1.tif,b,train", "1.tif,a,train").replace("3.tif,b,train", "3.tif,a,train")
    manifest.write_text(text)
    plain = SlideData(DataConfig(manifest=manifest), ["a", "b"])
    even = SlideData(DataConfig(manifest=manifest, balance=True), ["a", "b"])
    assert sorted(int(b["targets"]["label"]) for b in plain.train_dataloader()) == [0] * 6 + [1] * 2
    assert sorted(int(b["targets"]["label"]) for b in even.train_dataloader()) == [0] * 4 + [1] * 4
    assert len(list(even.val_dataloader())) == 4  # evaluation shows each slide once


def test_the_manifest_says_how_large_pixels_are(manifest: Path) -> None:
    manifest.write_text("slide,label,mpp\n0.tif,a,0.5\n1.tif,b,\n")
    first, second = read_manifest(manifest)
    assert second.mpp is None
    image = Image(first.open(), factor=4)
    assert image.resolution is not None and image.resolution.mean == pytest.approx(2.0)
    assert tuple(image.shape) == (1, 3, 64, 80)
    image = Image(Slide.open(first.path), factor=4)
    assert image.shape == (1, 3, 64, 80) and image.resolution is None, "to shrink it, nobody needs to know"
    manifest.write_text("slide,label,mpp\n0.tif,a,0.5\n1.tif,b,half\n")
    with pytest.raises(UserError, match=r"line 3: mpp is 'half'"):
        SlideData(DataConfig(manifest=manifest), ["a", "b"])
