"""Many tiles of many slides leave nothing behind."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from pathlib import Path

import psutil

from wsi_trainer.synthetic import generate
from wsi_trainer.view.contents import contents_of
from wsi_trainer.view.scene import OPEN, Scene
from wsi_trainer.view.tiles import TiledSlide

MIB = 2**20


def test_memory_is_flat_over_random_tiles_of_many_slides(tmp_path: Path, count: Callable[..., int]) -> None:
    slides = count(ci=12, full=50)
    generate(tmp_path, slides=4, side=640, seed=0, workers=1)
    made = sorted((tmp_path / "slides").glob("*.tif"))
    shown = tmp_path / "shown"
    shown.mkdir()
    for number in range(slides):
        (shown / f"{number}.tif").hardlink_to(made[number % 4])
    scene, chance = Scene(contents_of(shown)), random.Random(0)

    def look(times: int) -> float:
        for _ in range(times):
            slide = chance.randrange(slides)
            about = scene.about(slide)
            level = chance.randint(0, about["coarsest"])
            with scene.pool.lease(slide) as opened:
                assert isinstance(opened, TiledSlide)
                rows, columns = opened.grid(level)
            scene.tile(slide, level, chance.randrange(rows), chance.randrange(columns))
            assert scene.pool.opened <= OPEN
        gc.collect()
        return float(psutil.Process().memory_info().rss / MIB)

    before = look(100)  # libraries have made their caches
    assert look(count(ci=200, full=5000)) - before < 24
    scene.close()
    assert scene.pool.opened == 0
