"""Folders of runs with known predictions, and a browser."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tifffile

from wsi_trainer.data.manifest import SlideRecord, write_manifest
from wsi_trainer.environment import environment
from wsi_trainer.fit.run import Run
from wsi_trainer.io.files import write_json
from wsi_trainer.metrics import SCORES, ClassPredictions, summarise

MakeRun = Callable[[str, np.ndarray], Run]
SLIDES = 24


@pytest.fixture
def labels() -> np.ndarray:
    return np.arange(SLIDES) % 2


@pytest.fixture
def make_run(tmp_path: Path, labels: np.ndarray) -> MakeRun:
    """Write the folder of a run with these probabilities of the second class."""
    records = []
    for index in range(SLIDES):
        path = tmp_path / f"slide {index} <&>.tif"
        pixels = np.full((256, 320, 3), 200 - index, dtype=np.uint8)
        tifffile.imwrite(path, pixels, tile=(128, 128), photometric="rgb")
        label = ("normal", "tumour")[labels[index]]
        records.append(SlideRecord(path.name, path, label, f"p{index // 2 * 2 + labels[index]}", "test"))

    def make(name: str, positive: np.ndarray) -> Run:
        folder = Run(tmp_path / name)
        predictions = ClassPredictions(
            tuple(r.slide for r in records),
            tuple(r.patient for r in records),
            ("normal", "tumour"),
            labels,
            np.stack([1 - positive, positive], axis=1),
        )
        predictions.write(folder.predictions_file("test"))
        write_json(folder.evaluation("test"), {"split": "test", **summarise(predictions, SCORES, 50)})
        write_json(folder.environment, environment())
        write_json(folder.memory, {"engine": "plain PyTorch", "plain_bytes": 2**20, "image_shape": [1, 3, 256, 320]})
        write_manifest(folder.splits, records)
        metrics = folder.metrics / "version_0" / "metrics.csv"
        metrics.parent.mkdir(parents=True)
        metrics.write_text("epoch,step,train_loss,val_loss\n0,1,,0.7\n0,1,0.8,\n1,2,,0.5\n1,2,0.4,\n")
        folder.config.write_text("train: {epochs: 2}\n")
        return folder

    return make


Browser = Callable[..., tuple[str, str]]


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Browser:
    """Open a page in headless Chromium; returns the page as it is after its scripts, and what it logged."""
    program = next((p for p in ("chromium", "chromium-browser", "google-chrome") if shutil.which(p)), None)
    if program is None:
        pytest.skip("no Chromium: apt-get install chromium")
    profile = tmp_path_factory.mktemp("profile")

    def run(page: Path, *options: str) -> tuple[str, str]:
        command = [
            program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--log-level=0",
            "--enable-logging=stderr", f"--user-data-dir={profile}", "--virtual-time-budget=3000",
            *options, page.as_uri(),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        logged = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        return done.stdout, "\n".join(logged)

    return run
