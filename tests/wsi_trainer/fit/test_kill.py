"""`wsi-train fit` killed at random moments and continued ends with the weights of the run that was not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.warm import start
from tests.wsi_trainer.fit import killing


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """What each kind of run gave, to be kept together."""
    return {}


@pytest.mark.parametrize("engine", ["tiled", "plain"])
def test_killed_and_continued(
    engine: str,
    words: list[str],
    square_slides: Path,
    tmp_path: Path,
    count: Callable[..., int],
    measured: dict[str, Any],
    record_result: Callable[[str, dict[str, Any]], None],
) -> None:
    common = [word for word in words if not word.startswith(("--out", "--train.budget", "--train.resamples"))]
    budget = "1MiB" if engine == "tiled" else "null"
    more = [f"--train.budget={budget}", "--model.dropout=0.3", "--train.checkpoint_every=1", "--train.resamples=5"]
    command = ["fit", *common, f"--data.manifest={square_slides}", *more, "--train.accumulate=2"]
    command.append(f"--train.epochs={count(ci=3, full=12)}")
    kills = count(ci=1, full=25)
    log, found = tmp_path / "log.txt", tmp_path / "found.json"
    process = start(log, killing.report, tmp_path, kills, 7, command, found)
    process.join(60 + 60 * kills)
    process.kill()
    assert found.is_file(), log.read_text()[-3000:]
    result = json.loads(found.read_text())
    assert result["identical"] == kills
    measured[engine] = result
    if len(measured) == 2:
        record_result("fit_kill_resume", {**measured, "kills": sum(m["kills"] for m in measured.values())})
