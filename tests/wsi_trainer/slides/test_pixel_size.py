"""How large a pixel is: every unit that a format knows, sides that differ, and what cannot be read is quoted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch

from lightning_plugin import Box
from tests.wsi_trainer.small import QUICK, rows
from tests.wsi_trainer.test_uses import cohort
from wsi_trainer.cli import main
from wsi_trainer.data.cohort import read_headers
from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.data.patches import PatchConfig, open_bag
from wsi_trainer.errors import UnknownResolution
from wsi_trainer.slide.formats.base import Level, SlideInfo
from wsi_trainer.slide.geometry import Resolution, resolve
from wsi_trainer.slide.slide import Slide
from wsi_trainer.store.convert import Job, MaskOptions, Settings, convert

PIXELS = np.random.default_rng(2).integers(0, 256, (200, 320, 3), np.uint8)
RGB = {"photometric": "rgb", "tile": (64, 64)}


def _svs(path: Path, fields: str) -> Path:
    tifffile.imwrite(path, PIXELS, description=f"Aperio Image Library v1\n{fields}", metadata=None, **RGB)
    return path


def _ome(path: Path, **metadata: object) -> Path:
    tifffile.imwrite(path, PIXELS, ome=True, metadata={"axes": "YXS", **metadata}, **RGB)
    return path


@pytest.mark.parametrize(
    ("text", "mpp"), [("0.4990", 0.499), ("0,4990", 0.499), ("4.99e-1", 0.499), (" 0.5 ", 0.5), ("+0.5", 0.5)]
)
def test_mpp_of_aperio(tmp_path: Path, text: str, mpp: float) -> None:
    with Slide.open(_svs(tmp_path / "s.svs", f"AppMag = 20|MPP = {text}|Left = 1")) as reader:
        assert reader.info.mpp == (mpp, mpp)
        assert reader.info.power == 20


@pytest.mark.parametrize(
    ("fields", "tags", "said"),
    [
        ("MPP = 0.25", 20000, "0.25 µm is used, and its tags say 0.5 µm"),
        ("MPP = 0.25|MPP = 0.5", None, "0.25 µm is used, and a further MPP says 0.5 µm"),
        ("MPP = 0.5", 20000, ""),
        ("MPP = 0.499|MPP = 0.5", 20000, ""),
        ("MPP = 0.25", 72, ""),
    ],
)
def test_a_file_that_contradicts_itself_is_told(
    tmp_path: Path, fields: str, tags: int | None, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By pixels a centimetre; what no slide has, as 72, is a default of a program and says nothing."""
    resolution = {} if tags is None else {"resolution": (tags, tags), "resolutionunit": "CENTIMETER"}
    path, text = tmp_path / "s.svs", f"Aperio Image Library v1\nAppMag = 20|{fields}"
    tifffile.imwrite(path, PIXELS, description=text, metadata=None, **RGB, **resolution)
    with Slide.open(path) as slide:
        assert slide.info.mpp is not None and (said in " ".join(slide.info.notes) if said else not slide.info.notes)
    records = [SlideRecord(name, path, "0", name, "train") for name in ("a", "b")]
    read_headers(records)
    assert caplog.messages == ([f"a, b: {note}" for note in slide.info.notes])
    caplog.clear()
    read_headers([replace(record, others={"mpp": "0.25"}) for record in records])
    assert not caplog.messages, "the manifest decides"


@pytest.mark.parametrize("text", ["1e-e-", "0.4.9", "nan", "inf", "0,4,9", "half", "", "0x1", "1_0e"])
def test_mpp_that_is_no_number_is_named(tmp_path: Path, text: str) -> None:
    path = _svs(tmp_path / "s.svs", f"AppMag = 20|MPP = {text}|Left = 1")
    with Slide.open(path) as reader:
        with pytest.raises(UnknownResolution, match=f"the file says 'MPP = {text}"):
            reader.need_resolution()
        assert reader.resolution is None
    assert Slide.open(path, mpp=0.5).resolution == Resolution(0.5, 0.5, "manifest")


@pytest.mark.parametrize(
    ("unit", "value", "mpp"),
    [
        ("inch", 1e-5, 0.254), ("in", 1e-5, 0.254), ("nm", 250, 0.25), ("µm", 0.25, 0.25), ("μm", 0.25, 0.25),
        ("mm", 2.5e-4, 0.25), ("cm", 2.5e-5, 0.25), ("m", 2.5e-7, 0.25),
    ],
)  # fmt: skip
def test_units_of_ome(tmp_path: Path, unit: str, value: float, mpp: float) -> None:
    written = "in" if unit == "inch" else unit
    sizes = {f"PhysicalSize{axis}": value for axis in "XY"} | {f"PhysicalSize{axis}Unit": written for axis in "XY"}
    with Slide.open(_ome(tmp_path / "s.ome.tif", **sizes)) as reader:
        assert reader.info.mpp == pytest.approx((mpp, mpp))


def test_a_unit_that_no_slide_has_is_quoted(tmp_path: Path) -> None:
    sizes = {f"PhysicalSize{axis}": 2.5e-10 for axis in "XY"} | {f"PhysicalSize{axis}Unit": "km" for axis in "XY"}
    slide = Slide.open(_ome(tmp_path / "s.ome.tif", **sizes))
    with pytest.raises(UnknownResolution, match=r"the file says 'PhysicalSizeY = 2\.5e-10 km'"):
        slide.need_resolution()


def test_one_side_alone_is_not_both(tmp_path: Path) -> None:
    path = _ome(tmp_path / "s.ome.tif", PhysicalSizeX=0.5, PhysicalSizeXUnit="µm")
    with Slide.open(path) as reader, pytest.raises(UnknownResolution, match="PhysicalSizeY = "):
        reader.need_resolution()


# -- pixels that are not square


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    """0.25 µm high and 0.5 µm wide."""
    path = tmp_path / "slides" / "s.tif"
    path.parent.mkdir()
    tifffile.imwrite(path, PIXELS, resolution=(20000, 40000), resolutionunit="CENTIMETER", **RGB)
    return path


def _scales(store: Path) -> list[list[float]]:
    found = json.loads((store / "zarr.json").read_text())["attributes"]["ome"]["multiscales"][0]["datasets"]
    return [dataset["coordinateTransformations"][0]["scale"] for dataset in found]


def test_uneven_sides_are_told_and_right_everywhere(
    uneven: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["preprocess", str(uneven), str(out), "--tissue", "none", "--workers", "1"]) == 0
    assert "note s: pixels are not square: 0.5 x 0.25 µm (width x height)" in capsys.readouterr().out
    assert _scales(out / "s.zarr")[0] == [1.0, 0.25, 0.5]
    (listed,) = rows(out / "stores.csv")
    assert listed["mpp"] == ""  # the store says it; a single number would be wrong
    assert listed["note"].startswith("pixels are not square: 0.5 x 0.25")
    assert Slide.open(out / "s.zarr").resolution == Resolution(0.25, 0.5, "store")


def test_uneven_sides_become_even_where_a_resolution_is_asked_for(uneven: Path, tmp_path: Path) -> None:
    convert(Job(uneven, "s"), tmp_path, Settings(tissue="none", mpp=1.0))
    with Slide.open(tmp_path / "s.zarr") as reader:
        assert reader.info.shape == (50, 160)
        assert reader.info.mpp == (1.0, 1.0)
        # Each side is filtered by its own factor: the mean of 4 x 2 pixels is kept.
        inner = reader.read(0, 10, 10, 30, 100).mean()
    assert inner == pytest.approx(PIXELS[40:160, 20:220].mean(), abs=1)
    assert convert(Job(uneven, "s"), tmp_path, Settings(tissue="none", mpp=1.0)).mpp == 1.0


def test_tissue_of_uneven_pixels_lies_where_it_is(tmp_path: Path) -> None:
    pixels = np.full((1024, 2048, 3), 240, np.uint8)
    pixels[512:, 512:1024] = (180, 60, 120)
    path = tmp_path / "s.tif"
    tifffile.imwrite(path, pixels, resolution=(40000, 20000), resolutionunit="CENTIMETER", **RGB)  # 0.5 high, 0.25 wide
    for mpp in (None, 1.0):
        name = f"s{mpp}"
        convert(Job(path, name), tmp_path, Settings(mpp=mpp))
        import zarr

        label = zarr.open_group(tmp_path / f"{name}.zarr", mode="r")["labels/tissue/0"][:]
        height, width = label.shape
        assert label[int(0.75 * height), int(0.375 * width)] == 1
        assert not label[: int(0.4 * height)].any()
        assert not label[:, int(0.6 * width) :].any()
        assert not label[:, : int(0.15 * width)].any()


def test_an_ome_tiff_without_physical_size_says_it_by_its_tags(tmp_path: Path) -> None:
    with Slide.open(_ome(tmp_path / "tags.ome.tif")) as reader:
        assert reader.info.mpp is None
    path = tmp_path / "said.ome.tif"
    tifffile.imwrite(path, PIXELS, ome=True, metadata={"axes": "YXS"}, resolution=(2e4, 2e4), resolutionunit=3, **RGB)
    assert main(["preprocess", str(path), str(tmp_path / "out"), "--tissue", "none"]) == 0
    with Slide.open(path) as reader:
        assert reader.info.mpp == pytest.approx((0.5, 0.5))


def _info(mpp: tuple[float, float] | None) -> SlideInfo:
    return SlideInfo((Level(100, 100),), mpp, "test", "test")


def test_order_of_sources(uneven: Path, tmp_path: Path) -> None:
    """An explicit number before the manifest's, before the file's; a store's own before that of a manifest."""
    assert Slide.open(uneven).resolution == Resolution(0.25, 0.5, "metadata")
    assert Slide.open(uneven, mpp=0.3).resolution == Resolution(0.3, 0.3, "manifest")
    options = MaskOptions(source_mpp=0.4)
    assert options.open(uneven, 0.3).resolution == Resolution(0.4, 0.4, "explicit")
    assert MaskOptions().open(uneven, 0.3).resolution == Resolution(0.3, 0.3, "manifest")
    convert(Job(uneven, "s"), tmp_path, Settings(tissue="none"))
    store = tmp_path / "s.zarr"
    assert MaskOptions().open(store, 0.3).resolution == Resolution(0.25, 0.5, "store")
    assert options.open(store, 0.3).resolution == Resolution(0.4, 0.4, "explicit")


@pytest.mark.parametrize("mpp", [None, (352.86, 352.86), (0.001, 0.001), (0.5, 300.0)])
def test_unknown_or_implausible_is_an_error_that_names_slide_and_way_out(mpp) -> None:
    with pytest.raises(UnknownResolution, match=r"a slide\.svs: .*--source-mpp"):
        resolve("a slide.svs", _info(mpp), None, "manifest")
    assert resolve("a slide.svs", _info(mpp), 0.25, "manifest").mean == 0.25


def test_implausible_number_of_the_user_is_refused_too() -> None:
    with pytest.raises(UnknownResolution, match="mpp 72"):
        resolve("s", _info(None), 72.0, "explicit")


def test_an_implausible_size_is_none_for_everybody(tmp_path: Path) -> None:
    """72 dpi, which an image editor writes: the mask would have a pixel for each of the slide's, and maps that unit."""
    path = tmp_path / "s.tif"
    pixels = np.full((4200, 2200, 3), 240, np.uint8)
    pixels[1000:2000, 500:1500] = (180, 60, 120)
    tifffile.imwrite(path, pixels, resolution=(72, 72), resolutionunit="INCH", **RGB)
    with Slide.open(path) as slide:
        assert slide.info.mpp is not None and slide.resolution is None
        assert slide.transform.mpp is None and slide.transform.unit == (1.0, 1.0)
        assert slide.tissue().scale == 4


def test_uneven_sides_become_even_also_where_files_are_read(uneven: Path, tmp_path: Path) -> None:
    """As `preprocess` makes them: patches of the file are those of its store."""
    convert(Job(uneven, "s"), tmp_path, Settings(tissue="none", mpp=1.0))
    patches = PatchConfig(size=32, mpp=1.0, over="slide")
    raw, store = (open_bag(Slide.open(path), patches) for path in (uneven, tmp_path / "s.zarr"))
    assert raw.shape == store.shape == (5, 3, 32, 32)
    assert raw.resolution is not None and raw.resolution.is_square
    whole = Box((0, 0, 0), (5, 32, 32))
    assert torch.equal(raw.read(whole), store.read(whole))


def test_a_contradiction_is_told_once_whatever_the_run_reads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with patches of a size in micrometres, which are cut by that number, and by every command that cuts them."""
    slides = cohort(tmp_path / "slides", "svs")
    for row in rows(slides.table):
        path = slides.table.parent / row["slide"]
        pixels = tifffile.imread(path)
        text = "Aperio Image Library v1\nAppMag = 20|MPP = 0.5"
        tags = {"resolution": (40000, 40000), "resolutionunit": "CENTIMETER"}
        tifffile.imwrite(path, pixels, description=text, metadata=None, **RGB, **tags)
    said = "it contradicts itself about the size of a pixel: 0.5 µm is used, and its tags say 0.25 µm"
    bags = ["--model.backbone=PatchEncoder", "--model.backbone.network=VGG", "--model.backbone.network.widths=[4]"]
    bags += [
        "--model.backbone.size=32",
        "--data.patches.size=32",
        "--data.patches.mpp=0.5",
        "--data.patches.over=slide",
    ]
    words = [f"--data.manifest={slides.table}", "--data.flip_rotate=false", *bags]
    assert main(["fit", f"--out={tmp_path / 'run'}", *words, *QUICK]) == 0
    assert sum(said in message for message in caplog.messages) == 1
    caplog.clear()
    assert main(["predict", str(tmp_path / "run"), str(slides.table), "--name=again"]) == 0
    assert sum(said in message for message in caplog.messages) == 1
    caplog.clear()
    checkpoint = f"--checkpoint={tmp_path / 'run' / 'checkpoints' / 'last.ckpt'}"
    assert main(["embed", f"--out={tmp_path / 'features'}", *words, checkpoint]) == 0
    assert sum(said in message for message in caplog.messages) == 1
