"""A slide without coarse levels, as wide as slides get: its tissue and its pictures take little memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import tifffile

from wsi_trainer.synthetic import SlideSpec, SyntheticSlide

WIDTH, HEIGHT, TILE = 100_000, 4_000, 512
LIMIT = 400
"""MiB that may be taken beside what imports take; the slide has 1,200."""

PROGRAM = """
import sys
from pathlib import Path
from wsi_trainer.slide import Slide
from wsi_trainer.report.pictures import slide_picture
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024
path = Path(sys.argv[2])
before = peak()
what = sys.argv[1]
if what == "tissue":
    assert 0.5 < Slide.open(path).tissue().share < 1
elif what == "thumbnail":
    assert Slide.open(path).thumbnail(512).shape[1] > 400
else:
    assert slide_picture(path).startswith("data:image/jpeg")
print(peak() - before)
"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every tile is the same piece of tissue."""
    path = tmp_path_factory.mktemp("wide") / "slide.tif"
    piece = SyntheticSlide(SlideSpec(2048, 2048, tissue=0.9)).render(700, 700, TILE, TILE)
    tile = imagecodecs.jpeg8_encode(piece, colorspace="RGB", outcolorspace="YCbCr", subsampling="420")
    count = -(-WIDTH // TILE) * -(-HEIGHT // TILE)
    tifffile.imwrite(
        path, iter([tile] * count), shape=(HEIGHT, WIDTH, 3), dtype=np.uint8, tile=(TILE, TILE), compression="jpeg",
        photometric="ycbcr", subsampling=(2, 2), resolution=(20000, 20000), resolutionunit=3,
    )  # fmt: skip
    return path


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to read the peak of memory from")
@pytest.mark.parametrize("what", ["tissue", "thumbnail", "report"])
def test_wide_slides_take_little_memory(wide: Path, what: str) -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM, what, str(wide)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert int(run.stdout) < LIMIT
