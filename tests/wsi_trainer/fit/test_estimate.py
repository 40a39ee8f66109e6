"""What a run is expected to cost, before it starts."""

from pathlib import Path

import pytest

from lightning_plugin import Grid, Plan
from lightning_plugin.plan import Forecast, SegmentForecast, SegmentPlan
from wsi_trainer.cli import main
from wsi_trainer.fit.callbacks import estimate, sentence
from wsi_trainer.fit.run import Run, read_json
from wsi_trainer.io.display import duration

GIB = 2**30


def test_a_slide_takes_its_share_of_the_largest_ones_time() -> None:
    figures = SegmentForecast(stored_bytes=3 * GIB)
    stored = SegmentPlan((1,), Grid((2, 2)), Grid((2, 2)), tier="disk", forecast=figures)
    forecast = Forecast(peak_bytes=7 * GIB, plain_bytes=90 * GIB, seconds=60.0)
    plan = Plan((stored,), budget=8 * GIB, forecast=forecast)
    shapes = {"train": {"a": (1, 3, 1000, 2000), "b": (1, 3, 1000, 1000)}, "val": {"c": (1, 3, 1000, 2000)}}
    facts = estimate(plan, shapes, shapes["train"]["a"], 8 * GIB, 1, 5 * 2**20)
    assert facts["train_seconds"] == pytest.approx(90) and facts["validation_seconds"] == pytest.approx(20)
    assert facts["device_bytes"] == 7 * GIB and facts["disk_bytes"] == 3 * GIB and facts["host_bytes"] == 0
    assert estimate(plan, shapes, shapes["train"]["a"], 8 * GIB, 2, 0)["train_seconds"] == pytest.approx(45)
    assert (
        estimate(plan, shapes, shapes["train"]["a"], None, 1, 0)["device_bytes"] == 90 * GIB
    )  # plain PyTorch holds it all
    said = sentence(facts | {"patches": None})
    for part in (
        "2 slides to train on and 1 to validate",
        "2 min an epoch",
        "7.0 GiB on the device of 8.0 GiB",
        "disk",
    ):
        assert part in said, part


def test_times_are_written_in_the_unit_that_reads_best() -> None:
    assert [duration(s) for s in (0.2, 12, 600, 9000)] == ["a second", "12 s", "10 min", "2.5 h"]


def test_a_run_says_it_before_its_first_step(
    words: list[str], square_slides: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [f"--data.manifest={square_slides}", "--train.budget=16MiB", "--train.epochs=1"]
    assert main(["fit", *words, *options]) == 0
    shown = capsys.readouterr().out
    assert shown.index("6 slides to train on") < shown.index("Epoch 0")
    facts = read_json(Run(tmp_path / "run").estimate)
    assert facts["largest"] == [256, 256] and facts["pixels"]["train"] == 6 * 256 * 256
    assert 0 < facts["device_bytes"] <= facts["budget"] == 16 * 2**20 and facts["seconds_per_epoch"] > 0


def test_a_missing_slide_is_named_before_anything_runs(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.csv").write_text("slide,label\ngone.svs,0\nalso.svs,1\n")
    assert main(["fit", *words, f"--data.manifest={tmp_path / 'm.csv'}"]) == 2
    error = capsys.readouterr().err
    assert "2 of 2 slides are missing" in error and "gone.svs" in error and error.count("\n") == 1
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("budget", ["null", "16MiB"])
def test_a_run_that_cannot_be_estimated_says_so_and_trains(
    words: list[str], square_slides: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], budget: str
) -> None:
    """The second magnification reads running statistics that the first has still to write."""
    shared = ["--model.backbone.norm=batch", "--model.batchnorm_over=tissue", "--model.share_backbone=true"]
    scales = ["--model.magnifications=2", "--data.extra_downsamples=[2]", "--train.epochs=1"]
    options = [f"--data.manifest={square_slides}", *shared, *scales, f"--train.budget={budget}"]
    assert main(["fit", *words, *options]) == 0
    assert "there is no estimate: the network reads values while it runs" in capsys.readouterr().out
    assert not (tmp_path / "run" / "estimate.json").exists()
    assert any((tmp_path / "run" / "checkpoints").glob("*.ckpt"))
