"""What a user sees: the plan, tiles inside a long step, what steps cost and why they are slow."""

from __future__ import annotations

import io
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import RichProgressBar, TQDMProgressBar
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_plugin import Box, LazyImage, Plan, SFTStrategy, StepMonitor, TileSource
from lightning_plugin.strategy import feedback
from lightning_plugin.strategy.feedback import StepReport, count_tiles
from tests.lightning_plugin.strategy.modules import Each, Pictures, Slides, loader
from tests.lightning_plugin.strategy.training import TILES, fit


class Slow(TileSource):
    """A source on a slow disk."""

    def __init__(self, image: Tensor, seconds: float) -> None:
        self.image, self.seconds = image[None], seconds
        self.shape, self.dtype = tuple(self.image.shape), self.image.dtype

    def read(self, box: Box) -> Tensor:
        time.sleep(self.seconds)
        return self.image[(..., *(slice(lo, hi) for lo, hi in box.intervals()))]

    def constant(self, box: Box) -> None:
        return None


def slow(seconds: float) -> Each:
    data = Pictures(1)
    return Each({"image": LazyImage(Slow(data.images[0], seconds)), "label": data.labels})


def test_the_plan_is_printed_once_and_left_in_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = CSVLogger(tmp_path)
    strategy = SFTStrategy(**TILES)
    with caplog.at_level(logging.INFO, "lightning_plugin"):
        fit(Slides(), loader(6), strategy, max_steps=3, logger=logger, log_every_n_steps=1)
    assert caplog.text.count(str(strategy.plan)) == 1
    found = Path(logger.log_dir)
    assert Plan.from_json((found / "plan-train.json").read_text()).to_json() == strategy.plan.to_json()
    assert "peak" in (found / "plan-train.txt").read_text()


@pytest.mark.slow
def test_slides_of_other_sizes_take_a_line_and_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sizes = [(40 + 2 * k, 36) for k in range(8)]
    data = Each(*[next(iter(DataLoader(Pictures(2, size), batch_size=2))) for size in sizes])
    logger = CSVLogger(tmp_path)
    strategy = SFTStrategy(budget="64MiB", tile_over=1)
    with caplog.at_level(logging.INFO, "lightning_plugin"):
        fit(Slides(), data, strategy, max_steps=8, logger=logger, log_every_n_steps=4)
    text = caplog.text
    assert text.count("segment  ") == 1, "one table"
    assert [text.count(f"Plan for 2 x 3 x {h} x {w} ") for h, w in sizes] == [1] * 8
    found = sorted(path.name for path in Path(logger.log_dir).glob("plan*"))
    assert found == ["plan-train.json", "plan-train.txt"]


@pytest.mark.slow
def test_what_is_remembered_of_plans_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feedback, "MAX_LINES", 3)
    monkeypatch.setattr("lightning_plugin.strategy.feedback.SLOW_SECONDS", 0.0)
    data = Each(*[next(iter(DataLoader(Pictures(1, (40 + 2 * k, 36))))) for k in range(6)])
    strategy = SFTStrategy(budget="64MiB", tile_over=1)
    fit(Slides(), data, strategy, max_steps=6)
    told = strategy.feedback
    assert len(told.logged_lines) == 3 and len(told.logged_tables) == 1 and len(told.logged_reports) <= 3


def test_the_plan_is_in_tensorboard(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    fit(Slides(), loader(2), SFTStrategy(**TILES), max_steps=1, logger=logger, log_every_n_steps=1)
    events = next(Path(logger.log_dir).glob("events*")).read_bytes()
    assert b"plan/text_summary" in events


def test_every_step_is_reported(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    strategy = SFTStrategy(budget="1GiB", tile_over=1)
    data = Each(*[next(iter(slow(0.05)))] * 3)
    fit(Slides(), data, strategy, max_steps=3, callbacks=[StepMonitor()], logger=logger, log_every_n_steps=1)
    header, *rows = [line.split(",") for line in (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()]
    measured = [float(r[header.index("sft/measured_peak_bytes")]) for r in rows if r[header.index("sft/tiles")]]
    assert len(measured) == 3 and all(0 < m <= strategy.plan.peak_bytes <= 2**30 for m in measured)
    told = ("predicted_peak_bytes", "recompute_share", "input_share", "input_seconds", "spill_seconds", "step_seconds")
    assert {f"sft/{name}" for name in (*told, "identical_tiles_saved")} <= set(header)
    waited = [float(r[header.index("sft/input_seconds")]) for r in rows if r[header.index("sft/tiles")]]
    assert all(seconds >= 0.05 for seconds in waited), "each step reads the image, which takes that long"


def test_tiles_are_counted() -> None:
    strategy = SFTStrategy(tiles=(3, 2), backward_tiles=(2, 2))
    fit(Slides(), slow(0.0), strategy, max_steps=1)
    segments = strategy.plan.segments
    assert strategy.report.tiles == strategy.report.planned_tiles == len(segments) * (6 + 4)


@pytest.mark.slow
def test_a_step_that_waits_for_pixels_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lightning_plugin.strategy.feedback.SLOW_SECONDS", 0.0)
    with caplog.at_level(logging.INFO, "lightning_plugin"):
        strategy = SFTStrategy(**TILES)
        fit(Slides(), slow(0.2), strategy, max_steps=1)
    assert strategy.report.input_seconds > 0.2 * 6
    assert "input-bound" in caplog.text


def test_reasons() -> None:
    times = {"seconds": 10.0, "input_seconds": 1.0, "spill_seconds": 1.0}
    assert StepReport(**times).reason == "compute"
    assert StepReport(**(times | {"input_seconds": 6.0})).reason == "input"
    assert StepReport(**(times | {"spill_seconds": 6.0})).reason == "spill"
    assert "60 %" in str(StepReport(**(times | {"spill_seconds": 6.0})))


def test_waiting_for_pixels_is_told_from_two_per_cent_on() -> None:
    """Beside the main reason, and once."""
    told = str(StepReport(seconds=10.0, input_seconds=0.5))
    assert "compute-bound (95 %)" in told and "input-bound by 5 %" in told and "threads that read" in told
    assert "input-bound" not in str(StepReport(seconds=10.0, input_seconds=0.19))
    assert str(StepReport(seconds=10.0, input_seconds=6.0)).count("input-bound") == 1
    assert "a larger budget" not in told, "nothing was recomputed"
    assert "a larger budget recomputes less" in str(StepReport(seconds=10.0, recompute_share=0.1))


def test_nothing_listens_after_a_run() -> None:
    strategy = SFTStrategy(**TILES)
    fit(Slides(), loader(2), strategy, max_steps=1)
    assert strategy.engine.progress.listeners == []


class Screen(RichProgressBar):
    """A rich bar on a terminal that can be read."""

    def __init__(self) -> None:
        super().__init__(console_kwargs={"file": io.StringIO(), "force_terminal": True, "width": 100})

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.text = self._console.file.getvalue()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feedback, "BAR_DELAY", 0.0)
    monkeypatch.setattr(feedback, "BAR_INTERVAL", 0.0)


@pytest.mark.slow
def test_tiles_in_a_rich_bar(impatient: None) -> None:
    screen = Screen()
    strategy = SFTStrategy(**TILES)
    fit(
        Slides(), loader(4), strategy, val=loader(4), max_epochs=2, max_steps=-1, callbacks=[screen],
        enable_progress_bar=True,
    )  # fmt: skip
    assert "tiles" in screen.text
    total = count_tiles(next(iter(strategy.engine.planner.plans.values()))[0], grad=True)
    assert f"{total}/{total}" in screen.text


def test_tiles_in_a_tqdm_bar(impatient: None, capsys: pytest.CaptureFixture[str]) -> None:
    strategy = SFTStrategy(**TILES)
    fit(Slides(), loader(2), strategy, max_steps=1, callbacks=[TQDMProgressBar()], enable_progress_bar=True)
    total = strategy.report.planned_tiles
    assert "tiles: 100%" in capsys.readouterr().out.replace("\r", "\n") and total > 0


def test_short_steps_have_no_bar() -> None:
    screen = Screen()
    fit(Slides(), loader(2), SFTStrategy(**TILES), max_steps=1, callbacks=[screen], enable_progress_bar=True)
    assert "tiles" not in screen.text


@pytest.mark.slow
def test_a_step_leaves_no_memory_behind() -> None:
    """A kept loss must not keep the recording of its step, nor the image."""
    import gc
    import weakref

    images: list[Any] = []

    class Keeping(Slides):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            images.append(weakref.ref(batch["image"]))

    module = Keeping()
    fit(module, loader(8), SFTStrategy(**TILES), max_steps=4)
    gc.collect()
    assert len(module.losses) == 4
    assert sum(ref() is not None for ref in images) <= 1
    assert all(isinstance(loss, Tensor) and torch.isfinite(loss) for loss in module.losses)
