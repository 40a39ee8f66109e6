"""Files that are opened are closed: by each public way to open a slide, of each format, many times."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tifffile
from PIL import Image as Picture

from lightning_plugin import Box
from wsi_trainer.data.dataset import open_image
from wsi_trainer.data.patches import PatchConfig, open_bag
from wsi_trainer.errors import SlideError
from wsi_trainer.report.pictures import slide_picture
from wsi_trainer.slide.slide import Slide
from wsi_trainer.slide.views import Image
from wsi_trainer.view.contents import of_slides
from wsi_trainer.view.scene import Scene

TIMES = 50
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
    open_image(path, source_mpp=0.5).read(Box((0, 0), (40, 50)))


def shrunk(path: Path) -> None:
    open_image(path, 2, 0.5).read(Box((0, 0), (40, 50)))


def bag(path: Path) -> None:
    open_bag(path, PatchConfig(size=64, mpp=1.0, over="slide"), source_mpp=0.5).read(Box((0, 0, 0), (1, 64, 64)))


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
    times = TIMES if any_slide.suffix in (".tif", ".svs", ".zarr") else 5
    before = len(os.listdir(OPEN))
    for _ in range(times):
        way(any_slide)
    assert len(os.listdir(OPEN)) == before


COHORT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120))
from wsi_trainer.data.dataset import DataConfig
from wsi_trainer.data.patches import PatchConfig
from wsi_trainer.data.datamodule import SlideData
from lightning_plugin import LazyImage, Box
from pathlib import Path
patches = PatchConfig(size=64, mpp=1.0, over="slide") if sys.argv[2] == "bags" else None
config = DataConfig(manifest=Path(sys.argv[1]), downsample=1 if patches else 2, patches=patches)
data = SlideData(config, ["0", "1"], to_image=LazyImage)
for epoch in range(4):
    for batch in data.train_dataloader():
        assert "failure" not in batch, batch["failure"]
        start = (0,) * (3 if patches else 2)
        batch["image"].source.read(Box(start, tuple(at + 1 for at in start)))
print("read")
"""


@pytest.mark.parametrize("kind", ["shrunk", "bags"])
def test_a_cohort_of_slides_is_read_with_few_descriptors(slide: Path, tmp_path: Path, kind: str) -> None:
    """100 slides for four epochs, with 120 descriptors in all."""
    rows = []
    for number in range(100):
        os.link(slide, tmp_path / f"s{number}.tif") if slide.stat().st_dev == tmp_path.stat().st_dev else shutil.copy(
            slide, tmp_path / f"s{number}.tif"
        )
        rows.append(f"s{number}.tif,{number % 2},train")
    (tmp_path / "manifest.csv").write_text("slide,label,split\n" + "\n".join(rows) + "\n")
    command = [sys.executable, "-c", COHORT, str(tmp_path / "manifest.csv"), kind]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.stdout.strip() == "read", run.stderr[-2000:]
