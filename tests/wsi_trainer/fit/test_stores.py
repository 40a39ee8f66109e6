"""Training from stores by the user's own table, through the command line, while slides are renamed and added."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.wsi_trainer.small import QUICK, VGG, regions, rows
from wsi_trainer.cli import main
from wsi_trainer.fit.run import Run
from wsi_trainer.synthetic import generate

SPLITS = {"train": 0.5, "val": 0.25, "test": 0.25}


def preprocess(*words: object) -> int:
    return main(["preprocess", *map(str, words), "--workers", "1", "--stall-minutes", "0"])


@pytest.mark.slow
def test_regions_are_those_of_the_users_table(tmp_path: Path) -> None:
    """Paths in it stay relative to it: runs on slides and on their stores give the same numbers."""
    manifest = generate(tmp_path / "in", slides=8, seed=1, splits=SPLITS, workers=1, shape=(96, 128))
    assert any(row["regions"] for row in rows(manifest))
    assert preprocess(manifest, tmp_path / "out", "--tissue", "none") == 0
    words = [f"--data.manifest={manifest}", *regions()]
    assert main(["fit", *words, f"--out={tmp_path / 'slides'}"]) == 0
    assert main(["fit", *words, f"--out={tmp_path / 'stores'}", f"--data.stores={tmp_path / 'out'}"]) == 0
    found = Run(tmp_path / "stores")
    assert all(row["path"].endswith(".zarr") for row in rows(found.splits))
    assert rows(found.predictions_file("test")) == rows(Run(tmp_path / "slides").predictions_file("test"))


def test_a_template_with_labels_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = generate(tmp_path / "in", slides=12, seed=2, splits=SPLITS, workers=1, shape=(96, 96))
    out = tmp_path / "out"
    assert preprocess(tmp_path / "in" / "slides", out, "--tissue", "none") == 0
    words = [*VGG, *QUICK, f"--data.manifest={out / 'manifest.csv'}", f"--out={tmp_path / 'run'}"]
    assert main(["fit", *words]) == 2
    assert "manifest.csv, line 2: the column 'label' is empty" in capsys.readouterr().err
    known = {Path(row["slide"]).stem: row for row in rows(manifest)}
    done = [row | {"label": known[Path(row["slide"]).stem]["label"]} for row in rows(out / "manifest.csv")]
    (out / "manifest.csv").write_text("slide,label,patient\n" + "".join(f"{','.join(row.values())}\n" for row in done))
    assert preprocess(tmp_path / "in" / "slides", out, "--tissue", "none") == 0
    assert main(["fit", *words]) == 0
