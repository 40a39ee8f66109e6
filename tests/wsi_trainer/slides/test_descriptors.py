"""Files that are opened are closed: by each public way to open a slide, of each format, many times."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import tifffile
from PIL import Image as Picture

from lightning_plugin import Box, LazyImage
from tests.warm import start
from wsi_trainer.data.datamodule import SlideData
from wsi_trainer.data.dataset import DataConfig
from wsi_trainer.data.patches import PatchConfig, open_bag
from wsi_trainer.errors import SlideError
from wsi_trainer.report.pictures import slide_picture
from wsi_trainer.slide.slide import Slide
from wsi_trainer.slide.views import Image
from wsi_trainer.view.contents import of_slides
from wsi_trainer.view.scene import Scene

TIMES = 4
OPEN = Path("/proc/self/fd")
pytestmark = pytest.mark.skipif(not OPEN.exists(), reason="no /proc to count open files in")


@pytest.fixture(scope="module", params=["tif", "svs", "ndpi", "dicom", "png", "store"])
def any_slide(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A slide of each kind, with a resolution that its file says where it can."""
    if request.param in ("tif", "store"):
        return Path(request.getfixturevalue({"tif": "slide", "store": "store"}[request.param]))
    if request.param == "png":
        path = tmp_path_factory.mktemp("picture") / "slide.png"
        Picture.fromarray(tifffile.imread(request.getfixturevalue("slide"), key=0)).save(path)
        return path
    real: Path = request.getfixturevalue("real_slides")
    names = {"svs": "CMU-1-Small-Region.svs", "ndpi": "test3-DAPI-2-(387).ndpi", "dicom": "CMU-1-Small-Region_dicom"}
    return real / names[request.param]


def image(path: Path) -> None:
    Image(Slide.open(path, mpp=0.5)).read(Box((0, 0), (40, 50)))


def shrunk(path: Path) -> None:
    Image(Slide.open(path, mpp=0.5), factor=2).read(Box((0, 0), (40, 50)))


def bag(path: Path) -> None:
    open_bag(Slide.open(path, mpp=0.5), PatchConfig(size=64, mpp=1.0, over="slide")).read(Box((0, 0, 0), (1, 64, 64)))


def too_fine(path: Path) -> None:
    with pytest.raises(SlideError):
        Image(Slide.open(path, mpp=0.5), mpp=0.1)


def read(path: Path) -> None:
    with Slide.open(path) as reader:
        reader.read(0, 0, 0, 40, 50)


def small(path: Path) -> None:
    with Slide.open(path) as opened:
        opened.thumbnail(100)


def viewed(path: Path) -> None:
    scene = Scene(of_slides(path))
    scene.tile(0, 0, 0, 0)
    scene.close()


WAYS: list[Callable[[Path], object]] = [image, shrunk, bag, too_fine, read, small, slide_picture, viewed]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_files_are_closed(any_slide: Path, way: Callable[[Path], object]) -> None:
    way(any_slide)  # libraries open what they keep
    times = TIMES if any_slide.suffix in (".tif", ".svs", ".zarr") else 2
    before = len(os.listdir(OPEN))
    for _ in range(times):
        way(any_slide)
    assert len(os.listdir(OPEN)) == before


def read_cohort(manifest: Path) -> None:
    """Two epochs of images and of bags, with less than two descriptors for a slide."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))
    for patches in (None, PatchConfig(size=64, mpp=1.0, over="slide")):
        config = DataConfig(manifest=manifest, downsample=1 if patches else 2, patches=patches)
        data = SlideData(config, ["0", "1"], to_image=LazyImage)
        for _ in range(2):
            for batch in data.train_dataloader():
                assert "failure" not in batch, batch["failure"]
                start = (0,) * (3 if patches else 2)
                batch["image"].source.read(Box(start, tuple(at + 1 for at in start)))
    print("read")


@pytest.mark.slow
def test_a_cohort_of_slides_is_read_with_few_descriptors(slide: Path, tmp_path: Path) -> None:
    """50 slides with 80 descriptors in all."""
    for number in range(50):
        (tmp_path / f"s{number}.tif").symlink_to(slide)
    rows = [f"s{number}.tif,{number % 2},train" for number in range(50)]
    (tmp_path / "manifest.csv").write_text("slide,label,split\n" + "\n".join(rows) + "\n")
    process = start(tmp_path / "log", read_cohort, tmp_path / "manifest.csv")
    process.join()
    assert (tmp_path / "log").read_text().strip().endswith("read") and process.exitcode == 0
