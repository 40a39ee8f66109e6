"""Stores are what the specification says: other software reads the same pixels from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr

from wsi_trainer.io.files import write_json
from wsi_trainer.slide.formats.store import is_own_store
from wsi_trainer.slide.slide import Slide
from wsi_trainer.store.chunks import Layout, StoredLevel, ZstdCodec, encode_shard, pyramid, read_index
from wsi_trainer.store.export import export_ngff04
from wsi_trainer.store.ngff import image_array

LAYOUT = Layout(32, 128)


@pytest.fixture
def pixels() -> np.ndarray:
    """300 x 200 random pixels with two white chunks and a white shard."""
    image = np.random.default_rng(1).integers(0, 256, (3, 300, 200), np.uint8)
    image[:, 32:64, 64:128] = 255
    image[:, 128:256, 128:] = 255
    return image


@pytest.fixture
def array(tmp_path: Path, pixels: np.ndarray) -> Path:
    """These pixels as an array."""
    path = tmp_path / "0"
    write_json(path / "zarr.json", image_array((300, 200), LAYOUT, ZstdCodec()))
    for row in range(3):
        for column in range(2):
            part = pixels[:, row * 128 : (row + 1) * 128, column * 128 : (column + 1) * 128]
            data = b"".join(encode_shard(part, LAYOUT, ZstdCodec()))
            if data:
                (path / "c" / "0" / str(row)).mkdir(parents=True, exist_ok=True)
                (path / "c" / "0" / str(row) / str(column)).write_bytes(data)
    return path


def test_zarr_python_reads_the_same_pixels(array: Path, pixels: np.ndarray) -> None:
    opened = zarr.open_array(array, mode="r")
    assert opened.shards == (3, 128, 128)
    assert opened.chunks == (3, 32, 32)
    assert opened.fill_value == 255
    assert opened.metadata.dimension_names == ("c", "y", "x")
    assert np.array_equal(opened[:], pixels)


def test_tensorstore_reads_the_same_pixels(array: Path, pixels: np.ndarray) -> None:
    tensorstore = pytest.importorskip("tensorstore", reason="extra fast is not installed")
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{array}/"}}
    assert np.array_equal(tensorstore.open(spec, read=True).result().read().result(), pixels)


def test_zarr_python_writes_what_we_read(tmp_path: Path, pixels: np.ndarray) -> None:
    codecs = [zarr.codecs.ZstdCodec(level=3), zarr.codecs.Crc32cCodec()]
    written = zarr.create_array(
        tmp_path / "0", shape=pixels.shape, chunks=(3, 32, 32), shards=(3, 128, 128), dtype="u1",
        compressors=codecs, fill_value=255, config={"write_empty_chunks": False},
    )  # fmt: skip
    written[:] = pixels
    level = StoredLevel(tmp_path / "0", (300, 200), LAYOUT)
    assert np.array_equal(level.read(0, 0, 300, 200), pixels)
    assert level.is_fill(130, 130, 100, 60)


def test_boxes_and_absent_chunks(array: Path, pixels: np.ndarray) -> None:
    level = StoredLevel(array, (300, 200), LAYOUT)
    rng = np.random.default_rng(2)
    for _ in range(50):
        y, x = rng.integers(0, 299), rng.integers(0, 199)
        h, w = rng.integers(1, 300 - y + 1), rng.integers(1, 200 - x + 1)
        assert np.array_equal(level.read(y, x, h, w), pixels[:, y : y + h, x : x + w])
        if level.is_fill(y, x, h, w):
            assert (pixels[:, y : y + h, x : x + w] == 255).all()
    assert level.is_fill(32, 64, 32, 64)
    assert level.is_fill(130, 140, 100, 60)
    assert not level.is_fill(32, 63, 32, 2)
    assert not (array / "c" / "0" / "1" / "1").exists()
    assert read_index(array / "c" / "0" / "1" / "1", LAYOUT) is None


def test_store_passes_the_validators(store: Path) -> None:
    models = pytest.importorskip("ome_zarr_models", reason="extra validate is not installed")
    yaozarrs = pytest.importorskip("yaozarrs", reason="extra validate is not installed")
    image = models.open_ome_zarr(zarr.open_group(store, mode="r"))
    assert type(image).__name__ == "Image"
    label = models.open_ome_zarr(zarr.open_group(store / "labels" / "tissue", mode="r"))
    assert type(label).__name__ == "ImageLabel"
    yaozarrs.validate_zarr_store(store)
    yaozarrs.validate_zarr_store(store / "labels" / "tissue")


def test_ome_zarr_py_reads_the_same_pixels(store: Path) -> None:
    pytest.importorskip("ome_zarr", reason="extra validate is not installed")
    from ome_zarr.io import parse_url
    from ome_zarr.reader import Reader

    nodes = list(Reader(parse_url(store))())
    assert [tuple(level.shape) for level in nodes[0].data] == [(3, *s) for s in pyramid(1037, 803)]
    assert np.array_equal(np.asarray(nodes[0].data[0]), zarr.open_array(store / "0", mode="r")[:])
    assert len(nodes) > 1  # the label


def test_own_stores_are_known_and_others_are_not(store: Path, tmp_path: Path) -> None:
    assert is_own_store(store)
    zarr.create_array(tmp_path / "s.zarr" / "0", shape=(3, 64, 64), chunks=(3, 64, 64), dtype="u1")
    assert not is_own_store(tmp_path / "s.zarr")
    assert not is_own_store(tmp_path)


# -- copies for other software, and stores of earlier versions


def test_ngff_04_copy_is_valid_and_has_the_same_pixels(store: Path, tmp_path: Path) -> None:
    assert export_ngff04(store, tmp_path / "s.zarr")
    for level in range(3):
        old = zarr.open_array(tmp_path / "s.zarr" / str(level), mode="r")
        assert old.metadata.zarr_format == 2
        assert np.array_equal(old[:], zarr.open_array(store / str(level), mode="r")[:])
    chunks = list((tmp_path / "s.zarr" / "0").rglob("*"))
    assert len(chunks) < 17 * 13  # absent chunks stay absent
    with Slide.open(tmp_path / "s.zarr") as reader:
        assert reader.info.vendor == "ome-zarr 0.4"
        assert reader.info.mpp == pytest.approx((0.5, 0.5))
    assert not export_ngff04(store, tmp_path / "s.zarr")


def test_ngff_04_copy_passes_the_validator(store: Path, tmp_path: Path) -> None:
    models = pytest.importorskip("ome_zarr_models", reason="extra validate is not installed")
    export_ngff04(store, tmp_path / "s.zarr")
    image = models.open_ome_zarr(zarr.open_group(tmp_path / "s.zarr", mode="r"))
    assert type(image).__module__.startswith("ome_zarr_models.v04")
