"""A synthetic slide is a function of its spec and the position, and of nothing else."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import openslide
import pytest
import tifffile

from wsi_trainer.synthetic import SlideSpec, SyntheticSlide, generate, make_cohort, write_slide
from wsi_trainer.synthetic.pyramid import level_shapes, reduce


@pytest.fixture(scope="module")
def slide() -> SyntheticSlide:
    return SyntheticSlide(SlideSpec(1111, 1403, seed=5, positive=True))


@pytest.mark.slow
def test_box_does_not_depend_on_how_it_is_cut(slide: SyntheticSlide) -> None:
    whole = slide.render(0, 0, 1111, 1403).astype(int)
    pieces = np.zeros_like(whole)
    for y in range(0, 1111, 171):  # a grid unrelated to any other, so that nuclei and groups are cut
        for x in range(0, 1403, 233):
            height, width = min(171, 1111 - y), min(233, 1403 - x)
            pieces[y : y + height, x : x + width] = slide.render(y, x, height, width)
    # A matrix product of another size may round differently: one grey level in few pixels.
    difference = np.abs(whole - pieces)
    assert difference.max() <= 1
    assert (difference > 0).mean() < 1e-3


def test_known_glass_holds_no_tissue(slide: SyntheticSlide) -> None:
    whole = slide.render(0, 0, 1111, 1403)
    known = 0
    for y in range(0, 1111 - 64, 64):
        for x in range(0, 1403 - 64, 64):
            if slide.is_background(y, x, 64, 64):
                known += 1
                assert (whole[y : y + 64, x : x + 64] == slide.background).all()
    assert known > 50


@pytest.mark.parametrize("bad", [{"height": 10}, {"tissue": 0.0}, {"seed": -1}])
def test_impossible_specs_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad)).replace("height", "too small")):
        SlideSpec(**{"height": 500, "width": 500, **bad})


@pytest.mark.parametrize("seed", range(8))  # whose textures take longer to make than all slides of a seed
def test_the_smallest_slides_are_drawn(seed: int) -> None:
    for height, width in ((64, 64), (96, 130), (130, 96), (64, 200)):
        for tissue in (0.02, 0.4, 0.9):
            slide = SyntheticSlide(SlideSpec(height, width, seed=seed, tissue=tissue, positive=True))
            assert slide.render(0, 0, height, width).shape == (height, width, 3)
            assert slide.sites


# -- the written files: reproducible, readable by OpenSlide, streamed


def _hashes(root: Path) -> dict[str, str]:
    files = sorted(p for p in root.rglob("*") if p.is_file())
    return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.mark.slow
def test_bytes_are_reproducible_and_do_not_depend_on_workers(tmp_path: Path) -> None:
    for name, workers in (("a", 1), ("b", 3)):
        generate(tmp_path / name, slides=4, side=700, seed=9, noise=True, workers=workers)
    generate(tmp_path / "c", slides=4, side=700, seed=10, noise=True)
    assert _hashes(tmp_path / "a") == _hashes(tmp_path / "b")
    assert _hashes(tmp_path / "a") != _hashes(tmp_path / "c")


@pytest.mark.slow
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


def test_generator_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="slides=0"):
        generate(tmp_path, slides=0)
    with pytest.raises(ValueError, match="add up to 1"):
        generate(tmp_path, slides=2, splits={"train": 0.5, "test": 0.2})
    with pytest.raises(ValueError, match="side="):
        generate(tmp_path, slides=2, side=(900, 800))


@pytest.mark.slow
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


# -- labels are balanced, patients stay together, splits are stratified


@pytest.mark.parametrize("slides", [40, 61, 200])
def test_splits_have_their_share_of_each_label(slides: int) -> None:
    members = make_cohort(slides, 3)
    for label in (0, 1):
        counts = Counter(m.split for m in members if m.label == label)
        for split, share in (("train", 0.6), ("val", 0.2), ("test", 0.2)):
            assert abs(counts[split] - share * slides / 2) <= 2
