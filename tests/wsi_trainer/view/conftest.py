"""A run with known slides, predictions and maps, and a server that shows it."""

from __future__ import annotations

import asyncio
import http.client
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from aiohttp import web

from wsi_trainer.data.manifest import SlideRecord, write_manifest
from wsi_trainer.fit.run import Run
from wsi_trainer.io.files import write_json
from wsi_trainer.metrics import ClassPredictions
from wsi_trainer.regions.ngff import write_map
from wsi_trainer.slide.geometry import SlideTransform
from wsi_trainer.view.contents import Contents, contents_of
from wsi_trainer.view.scene import Scene
from wsi_trainer.view.server import Guard, make_app

STRIDE, DOWNSAMPLE = 8, 2
"""A position stands for 16 × 16 pixels of the slide."""
SHAPES = ((700, 1100), (513, 512), (1600, 900), (90, 70))
POSITIVE = (0.9, 0.8, 0.3, 0.4)
"""The run's probability of each slide; the first is wrong, and the worst."""
LABELS = (0, 1, 0, 1)


@dataclass(frozen=True)
class Made:
    """A run and what is in it."""

    folder: Run
    pixels: list[np.ndarray]
    maps: list[np.ndarray]
    regions: Path

    def contents(self) -> Contents:
        return contents_of(self.folder.path, regions=self.regions)


def texture(shape: tuple[int, int], seed: int) -> np.ndarray:
    """A slide's pixels: glass, with stained tissue in the middle."""
    chance = np.random.default_rng(seed)
    pixels = np.full((*shape, 3), 240, np.uint8)
    top, left = shape[0] // 4, shape[1] // 4
    inside = pixels[top : 3 * top, left : 3 * left]
    inside[:] = chance.normal((180, 90, 170), 20, inside.shape).clip(0, 255)
    return pixels


def make_run(folder: Path, slides: Path, positive: tuple[float, ...] = POSITIVE) -> Made:
    """Write the folder of a run as `fit` and `heatmap` do."""
    run = Run(folder)
    pixels = [texture(shape, seed) for seed, shape in enumerate(SHAPES)]
    slides.mkdir(exist_ok=True)
    records, maps, entries = [], [], {}
    for index, image in enumerate(pixels):
        path = slides / f"slide {index} <&>.tif"
        tifffile.imwrite(path, image, tile=(256, 256), photometric="rgb", resolution=(20000, 20000), resolutionunit=3)
        records.append(SlideRecord(path.name, path, ("a", "b")[LABELS[index]], f"p{index}", "test"))
        side = STRIDE * DOWNSAMPLE
        shape = (-(-image.shape[0] // side), -(-image.shape[1] // side))
        maps.append(np.random.default_rng(index).normal(size=shape).astype(np.float32))
        name = f"map {index}"
        run.maps("activation").mkdir(parents=True, exist_ok=True)
        np.save(run.maps("activation") / f"{name}.npy", maps[-1])
        write_map(
            run.maps("activation") / f"{name}.ome.zarr",
            maps[-1],
            SlideTransform(image.shape[:2]).coarser(side),
            {"stride": STRIDE},
        )
        place = SlideTransform(image.shape[:2], scale=(DOWNSAMPLE, DOWNSAMPLE)).record()
        entries[path.name] = {"array": f"{name}.npy", "layer": f"{name}.ome.zarr", "place": place, "stride": STRIDE}
    write_json(run.maps("activation") / "heatmaps.json", {"class": "b", "method": "activation", "slides": entries})
    run.config.write_text(f"data: {{manifest: x.csv, downsample: {DOWNSAMPLE}}}\n")
    write_manifest(run.splits, records)
    second = np.array(positive)
    names = tuple(record.slide for record in records)
    owners = tuple(record.patient for record in records)
    said = ClassPredictions(names, owners, ("a", "b"), np.array(LABELS), np.stack([1 - second, second], axis=1))
    said.write(run.predictions_file("test"))
    regions = folder / "regions"
    regions.mkdir()
    ring = [[10.0, 10.0], [50.0, 10.0], [50.0, 40.0], [10.0, 10.0]]
    write_json(
        regions / "slide 0 <&>.geojson", {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [ring]}}
    )
    return Made(run, pixels, maps, regions)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("view")
    return make_run(folder / "run", folder / "slides")


@pytest.fixture(scope="session")
def scene(made: Made) -> Iterator[Scene]:
    scene = Scene(made.contents())
    yield scene
    scene.close()


@dataclass(frozen=True)
class Reply:
    """The answer of a server."""

    status: int
    body: bytes
    headers: dict[str, str]


@dataclass(frozen=True)
class Served:
    """A running server."""

    port: int

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, target: str, method: str = "GET", **headers: str) -> Reply:
        """Send the target as it is, escapes and all."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.putrequest(method, target, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        reply = Reply(answer.status, answer.read(), {k.lower(): v for k, v in answer.getheaders()})
        connection.close()
        return reply


@contextmanager
def serving(scene: Scene, token: str | None = None) -> Iterator[Served]:
    """The application in a thread of its own."""
    loop, ready, ports = asyncio.new_event_loop(), threading.Event(), []
    runner = web.AppRunner(make_app(scene, Guard(token)), access_log=None, handler_cancellation=True)

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        ports.append(runner.addresses[0][1])
        ready.set()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.create_task(start())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)  # a server that a case of fuzzing began is left to run
    thread.start()
    assert ready.wait(30)
    try:
        yield Served(ports[0])
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


@pytest.fixture(scope="session")
def served(made: Made) -> Iterator[Served]:
    with serving(Scene(made.contents())) as found:
        yield found


@pytest.fixture
def made_twice(tmp_path: Path) -> tuple[Made, Made]:
    """Two runs on the same slides."""
    first = make_run(tmp_path / "first", tmp_path / "slides")
    return first, make_run(tmp_path / "second", tmp_path / "slides", (0.1, 0.7, 0.9, 0.6))


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    program = next((p for p in ("chromium", "chromium-browser", "google-chrome") if shutil.which(p)), None)
    if program is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which(program), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    """A window; whatever its console says ends the test."""
    page = chromium.new_page(viewport={"width": 1400, "height": 860})
    page.set_default_timeout(60_000)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("response", lambda found: said.append(f"{found.status} {found.url}") if found.status >= 400 else None)
    yield page
    page.close()
    assert not said


def open_page(page: Any, address: str) -> None:
    page.goto(address)
    page.wait_for_function("() => document.querySelector('#zoom').textContent !== ''")
    page.wait_for_load_state("networkidle")
