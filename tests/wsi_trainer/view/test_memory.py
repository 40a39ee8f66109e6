"""Many tiles of many slides leave nothing behind."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from wsi_trainer.synthetic import generate
from wsi_trainer.view.contents import contents_of
from wsi_trainer.view.scene import OPEN, Scene

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
            rows, columns = scene.slide(slide).grid(level)
            scene.tile(slide, level, chance.randrange(rows), chance.randrange(columns))
            assert scene.opened <= OPEN
        gc.collect()
        return float(psutil.Process().memory_info().rss / MIB)

    before = look(100)  # libraries have made their caches
    assert look(count(ci=200, full=5000)) - before < 24
    scene.close()
    assert scene.opened == 0


def test_threads_read_slides_that_others_close_and_none_stays_open(tmp_path: Path) -> None:
    generate(tmp_path, slides=4, side=400, seed=0, workers=1)
    scene = Scene(contents_of(tmp_path / "slides"), keep_open=1)
    expected = [scene.region(slide, 40, 50, 60, 70) for slide in range(4)]

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(60):
            slide = chance.randrange(4)
            assert scene.region(slide, 40, 50, 60, 70) == expected[slide]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    gc.collect()
    assert open_files(tmp_path) == scene.opened == 1
    scene.close()
    assert open_files(tmp_path) == scene.opened == 0


def open_files(folder: Path) -> int:
    return len({file.path for file in psutil.Process().open_files() if file.path.startswith(str(folder))})
