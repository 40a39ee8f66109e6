"""Conversion streams: memory does not grow with the slide."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import tifffile

from wsi_trainer.synthetic import SlideSpec, SyntheticSlide, write_slide
from wsi_trainer.synthetic.pyramid import write_pyramid

_CONVERT = """
import sys, time
from pathlib import Path
from wsi_trainer.store.convert import Job, convert
from wsi_trainer.store.convert import Settings
start = time.perf_counter()
convert(Job(Path(sys.argv[1]), "s"), Path(sys.argv[2]), Settings(background=sys.argv[4]), threads=int(sys.argv[3]))
seconds = time.perf_counter() - start
# Not getrusage: its peak survives exec and would be that of the test's own process.
status = Path("/proc/self/status").read_text()
print(int(status.split("VmHWM:")[1].split()[0]) // 1024, seconds)
"""


def _peak(slide: Path, out: Path, threads: int, background: str) -> tuple[int, float]:
    command = [sys.executable, "-c", _CONVERT, str(slide), str(out), str(threads), background]
    peak, seconds = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return int(peak), float(seconds)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to read the peak of memory from")
@pytest.mark.full
def test_tall_slide_needs_what_a_short_one_needs(tmp_path: Path) -> None:
    peaks = []
    for height in (16_000, 36_000):  # from about 15,000 on, all that is ever there at once is there
        path = tmp_path / f"{height}.tif"
        write_slide(path, SlideSpec(height, 4_500, tissue=0.04), threads=2)
        peaks.append(_peak(path, tmp_path / str(height), 1, "keep")[0])
    assert peaks[1] < 400  # MiB, for 486 MB of pixels
    assert peaks[1] < peaks[0] + 100


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to read the peak of memory from")
@pytest.mark.full
@pytest.mark.parametrize("background", ["keep", "constant"])
def test_gigapixels_in_little_memory(tmp_path: Path, background: str, record_result: Callable[..., None]) -> None:
    """100,000 x 80,000 px, 80 % glass: 24 GB of pixels."""
    path = tmp_path / "slide.tif"
    write_pyramid(path, mosaic(4096), (80_000, 100_000), mpp=0.5, threads=2)
    peak, seconds = _peak(path, tmp_path / "out", 2, background)
    record_result(f"gigapixels_{background}", {"peak_mib": peak, "seconds": round(seconds)})
    assert peak < 1536


def mosaic(side: int) -> Callable[[int, int, int, int], np.ndarray]:
    """Squares of one piece of tissue, of which each fifth is there; what is between is glass."""
    piece = SyntheticSlide(SlideSpec(side, side, tissue=0.9)).render(0, 0, side, side)

    def render(y: int, x: int, height: int, width: int) -> np.ndarray:
        out = np.full((height, width, 3), 244, np.uint8)
        for top in range(y - y % side, y + height, side):
            for left in range(x - x % side, x + width, side):
                if (top // side + 2 * (left // side)) % 5 == 0:
                    low, high = (max(y, top), max(x, left)), (min(y + height, top + side), min(x + width, left + side))
                    rows, columns = (slice(a - o, b - o) for a, b, o in zip(low, high, (top, left), strict=True))
                    out[low[0] - y : high[0] - y, low[1] - x : high[1] - x] = piece[rows, columns]
        return out

    return render


WIDTH, HEIGHT, TILE = 60_000, 4_000, 512
LIMIT = 400
"""MiB that may be taken beside what imports take; the slide has 690."""

PROGRAM = """
import sys
from pathlib import Path
from wsi_trainer.slide import Slide
from wsi_trainer.report.pictures import slide_picture
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024
path = Path(sys.argv[1])
before = peak()
assert 0.5 < Slide.open(path).tissue().share < 1
assert Slide.open(path).thumbnail(512).shape[1] > 400
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
@pytest.mark.full
def test_wide_slides_take_little_memory(wide: Path) -> None:
    """Their tissue, their thumbnail and their picture in a report."""
    run = subprocess.run([sys.executable, "-c", PROGRAM, str(wide)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert int(run.stdout) < LIMIT
