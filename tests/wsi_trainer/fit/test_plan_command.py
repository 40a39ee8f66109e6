"""`wsi-train plan`: every config plans for a slide that is not there."""

from pathlib import Path

import pytest

from lightning_plugin import Plan
from wsi_trainer.cli import main

SYNTHETIC = Path(__file__).resolve().parents[3] / "configs" / "synthetic.yaml"


def words(side: int, *more: str) -> list[str]:
    return ["plan", f"--config={SYNTHETIC}", f"--height={side}", f"--width={side}", *more]


def test_plans_a_slide_that_no_memory_here_would_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    options = ["--train.budget=2GiB", f"--json={json}", f"--picture={picture}"]
    assert main(words(50_000, *options)) == 0
    assert "1 x 3 x 50000 x 50000 within 2.0 GiB" in capsys.readouterr().out
    plan = Plan.from_json(json.read_text())
    assert 0 < plan.peak_bytes <= 2 * 2**30 < 100 * 2**30 < plan.plain_bytes
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--train.budget=null"], "a plan needs a budget"),
        (["--train.budget=1B"], "budget"),
        (["--height=0"], "a slide of 0 × 512 pixels cannot be planned"),
    ],
)
def test_what_cannot_be_planned_is_one_line(more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(512, *more)) == 2
    assert message in capsys.readouterr().err
