"""The written files: reproducible, readable by OpenSlide, streamed."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import openslide
import pytest
import tifffile

from wsi_trainer.synthetic import SlideSpec, SyntheticSlide, generate, write_slide
from wsi_trainer.synthetic.pyramid import level_shapes, reduce


def _hashes(root: Path) -> dict[str, str]:
    files = sorted(p for p in root.rglob("*") if p.is_file())
    return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_bytes_are_reproducible_and_do_not_depend_on_workers(tmp_path: Path) -> None:
    for name, workers in (("a", 1), ("b", 3)):
        generate(tmp_path / name, slides=4, side=700, seed=9, noise=True, workers=workers)
    generate(tmp_path / "c", slides=4, side=700, seed=10, noise=True)
    assert _hashes(tmp_path / "a") == _hashes(tmp_path / "b")
    assert _hashes(tmp_path / "a") != _hashes(tmp_path / "c")


def test_openslide_reads_pyramid_resolution_and_pixels(tmp_path: Path) -> None:
    spec = SlideSpec(1301, 2050, mpp=0.25)
    path = tmp_path / "slide.tif"
    write_slide(path, spec)
    rendered = SyntheticSlide(spec).render(0, 0, 1301, 2050)
    with openslide.OpenSlide(path) as slide:
        assert slide.level_dimensions == ((2050, 1301), (513, 326), (129, 82))
        assert float(slide.properties["openslide.mpp-x"]) == pytest.approx(0.25, rel=1e-6)
        assert float(slide.properties["openslide.mpp-y"]) == pytest.approx(0.25, rel=1e-6)
        for level, image in ((0, rendered), (1, reduce(rendered)), (2, reduce(reduce(rendered)))):
            read = np.asarray(slide.read_region((0, 0), level, image.shape[1::-1]))[..., :3]
            assert np.abs(read.astype(int) - image).mean() < 5  # what JPEG loses
    with tifffile.TiffFile(path) as tif:
        assert [page.shape[:2] for page in tif.pages] == level_shapes(1301, 2050)
        assert np.abs(tif.pages[0].asarray().astype(int) - rendered).mean() < 3


def test_smallest_slide_has_one_level(tmp_path: Path) -> None:
    write_slide(tmp_path / "small.tif", SlideSpec(250, 100))
    with openslide.OpenSlide(tmp_path / "small.tif") as slide:
        assert slide.level_dimensions == ((100, 250),)


def test_interrupted_slide_leaves_no_file(tmp_path: Path) -> None:
    def interrupt(pixels: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_slide(tmp_path / "slide.tif", SlideSpec(600, 600), progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_lesions_are_told_for_positive_slides_only(tmp_path: Path) -> None:
    manifest = generate(tmp_path, slides=4, side=800)
    for line in manifest.read_text().splitlines()[1:]:
        slide, label = line.split(",")[:2]
        name = Path(slide).stem + ".geojson"
        lesions, decoys = (json.loads((tmp_path / k / name).read_text()) for k in ("lesions", "decoys"))
        assert bool(lesions["features"]) == (label == "1")
        assert bool(decoys["features"]) == (label == "0")
        for feature in lesions["features"] + decoys["features"]:
            ring = feature["geometry"]["coordinates"][0]
            assert ring[0] == ring[-1]


_PEAK = """
import sys
from pathlib import Path
from wsi_trainer.synthetic import SlideSpec, write_slide
height, width = map(int, sys.argv[2:4])
write_slide(Path(sys.argv[1]), SlideSpec(height, width, tissue=0.05))
# Not getrusage: its peak survives exec and would be that of the test's own process.
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to read the peak of memory from")
def test_memory_does_not_grow_with_height(tmp_path: Path) -> None:
    """A slide of 72 Mpx (216 MB of pixels) costs hardly more than its first band."""

    def peak(height: int) -> int:
        command = [sys.executable, "-c", _PEAK, str(tmp_path / "s.tif"), str(height), "6000"]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) // 1024

    short, tall = peak(1500), peak(12_000)
    assert tall < short + 100  # MiB


def test_generator_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="slides=0"):
        generate(tmp_path, slides=0)
    with pytest.raises(ValueError, match="add up to 1"):
        generate(tmp_path, slides=2, splits={"train": 0.5, "test": 0.2})
    with pytest.raises(ValueError, match="side="):
        generate(tmp_path, slides=2, side=(900, 800))


def test_recipe_makes_a_data_set(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[3] / "datasets" / "synthetic" / "make.py"
    command = [sys.executable, str(recipe), str(tmp_path / "out"), "--slides", "2", "--side", "300-400"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "manifest.csv").exists()
    assert len(list((tmp_path / "out" / "slides").glob("*.tif"))) == 2
    wrong = subprocess.run([*command, "--splits", "train=2"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "add up to 1" in wrong.stderr
    assert "Traceback" not in wrong.stderr
