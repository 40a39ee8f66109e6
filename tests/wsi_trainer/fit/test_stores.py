"""Training from stores by the user's own table, through the command line, while slides are renamed and added."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest

from wsi_trainer.cli import main
from wsi_trainer.fit.run import Run
from wsi_trainer.synthetic import generate

SPLITS = {"train": 0.5, "val": 0.25, "test": 0.25}
SMALL = [
    "--model.backbone=wsi_trainer.models.VGG",
    "--model.backbone.widths=[4,8]",
    "--model.backbone.convs=1",
    "--train.epochs=1",
    "--train.accelerator=cpu",
    "--train.budget=null",
    "--train.resamples=20",
]


def preprocess(*words: object) -> int:
    return main(["preprocess", *map(str, words), "--workers", "1", "--stall-minutes", "0"])


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_regions_are_those_of_the_users_table(tmp_path: Path) -> None:
    """Paths in it stay relative to it: runs on slides and on their stores give the same numbers."""
    manifest = generate(tmp_path / "in", slides=8, seed=1, splits=SPLITS, workers=1, shape=(96, 128))
    assert any(row["regions"] for row in rows(manifest))
    assert preprocess(manifest, tmp_path / "out", "--tissue", "none") == 0
    words = [
        f"--data.manifest={manifest}",
        "--model.backbone=wsi_trainer.models.UNet",
        "--model.backbone.widths=[4,8]",
        "--model.task={class_path: SegmentationTask, init_args: {classes: [normal, lesion]}}",
        "--train.epochs=1",
        "--train.accelerator=cpu",
        "--train.budget=64MiB",
        "--train.monitor=val_dice",
        "--train.resamples=20",
    ]
    assert main(["fit", *words, f"--out={tmp_path / 'slides'}"]) == 0
    for name in ("stores", "again"):
        assert main(["fit", *words, f"--out={tmp_path / name}", f"--data.stores={tmp_path / 'out'}"]) == 0
        found = Run(tmp_path / name)
        assert all(row["path"].endswith(".zarr") for row in rows(found.splits))
        assert rows(found.predictions("test")) == rows(Run(tmp_path / "slides").predictions("test"))


def test_slides_that_were_renamed_are_in_one_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = generate(tmp_path / "in", slides=12, seed=2, splits=SPLITS, workers=1, shape=(96, 96))
    table = rows(manifest)

    def listed(name: str) -> None:
        lines = [f"{name.format(Path(row['slide']).name)},{row['label']},{row['patient']}\n" for row in table]
        (tmp_path / "in" / "slides" / "mine.csv").write_text("slide,label,patient\n" + "".join(lines))

    mine, out = tmp_path / "in" / "slides" / "mine.csv", tmp_path / "out"
    listed("{}")
    assert preprocess(mine, out, "--tissue", "none") == 0
    for row in table:
        path = tmp_path / "in" / row["slide"]
        path.rename(path.with_name(f"case_{path.name}"))
    listed("case_{}")
    assert preprocess(mine, out, "--tissue", "none") == 0
    assert "and 7 more" in capsys.readouterr().out  # notes that two stores are one slide
    assert len(list(out.glob("*.zarr"))) == 24
    assert main(["fit", *SMALL, f"--data.manifest={mine}", f"--data.stores={out}", f"--out={tmp_path / 'run'}"]) == 0
    splits = rows(Run(tmp_path / "run").splits)
    assert len(splits) == 12 and max(Counter(row["slide"] for row in splits).values()) == 1
    assert main(["test", str(tmp_path / "run"), "--overwrite"]) == 0


def test_a_template_with_labels_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = generate(tmp_path / "in", slides=12, seed=2, splits=SPLITS, workers=1, shape=(96, 96))
    out = tmp_path / "out"
    assert preprocess(tmp_path / "in" / "slides", out, "--tissue", "none") == 0
    words = [*SMALL, f"--data.manifest={out / 'manifest.csv'}", f"--out={tmp_path / 'run'}"]
    assert main(["fit", *words]) == 2
    assert "manifest.csv, line 2: the column 'label' is empty" in capsys.readouterr().err
    known = {Path(row["slide"]).stem: row for row in rows(manifest)}
    done = [row | {"label": known[Path(row["slide"]).stem]["label"]} for row in rows(out / "manifest.csv")]
    (out / "manifest.csv").write_text("slide,label,patient\n" + "".join(f"{','.join(row.values())}\n" for row in done))
    assert preprocess(tmp_path / "in" / "slides", out, "--tissue", "none") == 0
    assert main(["fit", *words]) == 0
