"""Where tissue is, position by position, as the slide is turned; further magnifications beside the slide."""

from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
import zarr

from lightning_plugin import Box
from wsi_trainer.data.datamodule import SlideData
from wsi_trainer.data.dataset import DataConfig, TissueMap, tissue_of
from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.preprocess.command import preprocess
from wsi_trainer.slide.augment import Augmentation
from wsi_trainer.slide.slide import Slide
from wsi_trainer.slide.tissue import TissueMask
from wsi_trainer.slide.views import Image

WHOLE = (330, 270)
MASK = TissueMask(np.random.default_rng(0).random((42, 34)) < 0.05, 8)


@pytest.mark.parametrize("stride", [1, 4, 16])
@pytest.mark.parametrize("how", [Augmentation(), Augmentation(True, False, True, (5, -9)), Augmentation(True, True)])
def test_a_position_counts_if_any_of_its_pixels_is_tissue(how: Augmentation, stride: int) -> None:
    tissue = TissueMap(MASK, WHOLE, stride, how)
    finest = TissueMap(MASK, WHOLE, 1, how)
    pixels = finest.read(Box.whole(finest.shape[2:]))[0, 0].numpy() > 0
    rows, columns = tissue.shape[2:]
    expected = np.zeros((rows, columns), dtype=bool)
    for y, x in np.argwhere(pixels):
        expected[y // stride, x // stride] = True
    whole = tissue.read(Box((0, 0), (rows, columns)))[0, 0].numpy()
    np.testing.assert_array_equal(whole, expected)
    box = Box((rows // 3, columns // 2), (rows, columns - columns // 4))
    np.testing.assert_array_equal(
        tissue.read(box)[0, 0].numpy(), whole[rows // 3 :, columns // 2 : columns - columns // 4]
    )
    for y in range(0, rows, 3):  # what is known without reading is true
        small = Box((y, 0), (min(y + 3, rows), min(2, columns)))
        value = tissue.constant(small)
        assert value is None or (int(value[0]) == 0 and not tissue.read(small).any())


@pytest.fixture
def slides(tmp_path: Path) -> Path:
    """Two slides with a stained square on glass, 0.5 µm a pixel."""
    lines = ["slide,label,split"]
    for index in range(2):
        pixels = np.full((512, 640, 3), 240, dtype=np.uint8)
        pixels[128:256, 320:512] = (180, 60, 150)
        options = {"resolution": (20000, 20000), "resolutionunit": "CENTIMETER"}
        tifffile.imwrite(tmp_path / f"{index}.tif", pixels, tile=(128, 128), photometric="rgb", **options)
        lines.append(f"{index}.tif,{'ab'[index]},{('train', 'val')[index]}")
    path = tmp_path / "manifest.csv"
    path.write_text("\n".join(lines))
    return path


def test_the_mask_is_that_of_the_store_or_else_found(slides: Path, tmp_path: Path) -> None:
    assert preprocess(str(slides), tmp_path / "zarr") == 0
    original, store = slides.parent / "0.tif", next((tmp_path / "zarr").rglob("0*.zarr"))
    found, stored = (tissue_of(Image(Slide.open(path))).cover(0, 0, 512, 640) for path in (original, store))
    label = zarr.open_array(store / "labels" / "tissue" / "0", mode="r")[:] > 0
    np.testing.assert_array_equal(stored, label)
    np.testing.assert_array_equal(found, stored)
    for mask in (found, stored):
        assert mask[130:254, 324:508].all() and mask.mean() < 0.4


def test_a_batch_has_its_context_and_where_tissue_is_turned_alike(slides: Path) -> None:
    config = DataConfig(manifest=slides, extra_downsamples=(4,))
    data = SlideData(config, ["a", "b"], tissue_stride=16)
    (still,) = data.val_dataloader()
    assert tuple(still["image"].shape) == (1, 3, 512, 640) and tuple(still["context"][0].shape) == (1, 3, 128, 160)
    assert [tuple(tissue.shape) for tissue in still["tissue"]] == [(1, 1, 32, 40), (1, 1, 8, 10)]
    loader = data.train_dataloader()
    seen = set()
    for _ in range(12):
        (batch,) = loader
        seen.add(tuple(batch["image"].shape))
        for image, tissue, size in zip((batch["image"], *batch["context"]), batch["tissue"], (16, 16)):
            stained = (image[0, 1] < 150).float()[None, None]
            covered = torch.nn.functional.max_pool2d(stained, size, ceil_mode=True)[0, 0] > 0
            assert tissue[0, 0][covered].all() and tissue.float().mean() < 0.6
    assert len(seen) == 2  # it was turned by a quarter, too


def test_magnifications_have_to_rise(slides: Path) -> None:
    for context in ((4, 2), (1,), (4, 4)):
        with pytest.raises(UserError, match="give rising factors above"):
            DataConfig(manifest=slides, extra_downsamples=context)


def test_a_slide_of_glass_is_refused(tmp_path: Path) -> None:
    pixels = np.full((256, 256, 3), 240, dtype=np.uint8)
    tifffile.imwrite(tmp_path / "glass.tif", pixels, tile=(128, 128), photometric="rgb")
    image = Image(Slide.open(tmp_path / "glass.tif"))
    with pytest.raises(SlideError, match=r"glass.tif: no tissue was found on it"):
        tissue_of(image)
