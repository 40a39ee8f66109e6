"""The recipes of `datasets/` on the real tables, and on wrong ones."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tests.wsi_trainer.small import rows

RECIPES = Path(__file__).parents[3] / "datasets"


def _run(recipe: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RECIPES / "manifest.py"), recipe, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_camelyon16_from_the_real_table(shared_data: Path, tmp_path: Path) -> None:
    done = _run("camelyon16", shared_data / "labels" / "camelyon16_reference.csv", tmp_path / "m.csv")
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path / "m.csv")
    assert len(found) == 399
    assert Counter(row["label"] for row in found) == {"normal": 239, "tumor": 160}
    test = [row for row in found if row["split"] == "test"]
    assert Counter(row["label"] for row in test) == {"normal": 80, "tumor": 49}
    assert {row["site"] for row in found} == {"center_0", "center_1"}
    assert found[0]["slide"] == "normal_001.tif"


def test_tcga_from_the_real_table(shared_data: Path, tmp_path: Path) -> None:
    done = _run("tcga", shared_data / "labels" / "tcga_lung_labels.csv", tmp_path / "m.csv")
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path / "m.csv")
    assert len(found) == 941
    assert Counter(row["label"] for row in found) == {"adenocarcinoma": 467, "squamous": 474}
    assert all(row["slide"].startswith(row["patient"]) for row in found)
    assert all(row["slide"].endswith(".svs") for row in found)
    assert found[0]["site"] == "Site-28"


@pytest.mark.parametrize(
    ("recipe", "table", "config"),
    [
        ("camelyon16", "camelyon16_reference.csv", "tumour-detection.yaml"),
        ("camelyon16", "camelyon16_reference.csv", "patches.yaml"),
        ("tcga", "tcga_lung_labels.csv", "subtype.yaml"),
    ],
)
def test_shipped_configs_have_the_classes_of_the_tables(
    shared_data: Path, tmp_path: Path, recipe: str, table: str, config: str
) -> None:
    assert _run(recipe, shared_data / "labels" / table, tmp_path / "m.csv").returncode == 0
    task = yaml.safe_load((RECIPES.parent / "configs" / config).read_text())["model"]["task"]
    assert {row["label"] for row in rows(tmp_path / "m.csv")} == set(task["classes"])


def test_panda(tmp_path: Path) -> None:
    table = tmp_path / "train.csv"
    table.write_text("image_id,data_provider,isup_grade,gleason_score\n0005f7,karolinska,0,0+0\n000920,radboud,4,4+4\n")
    assert _run("panda", table, tmp_path / "m.csv").returncode == 0
    assert rows(tmp_path / "m.csv")[1] == {
        "slide": "000920.tiff", "label": "4", "patient": "000920", "site": "radboud", "split": "",
    }  # fmt: skip
    table.write_text("image_id,data_provider,isup_grade,gleason_score\n0005f7,karolinska,6,0+0\n")
    done = _run("panda", table, tmp_path / "m.csv")
    assert done.returncode == 2
    assert "isup_grade is '6'" in done.stderr


def test_manifest_lists_the_slides_that_are_there(tmp_path: Path) -> None:
    table = tmp_path / "reference.csv"
    table.write_text("image,type,class,center\nnormal_001.tif,normal,negative,0\ntest_002.tif,tumor,macro,1\n")
    (tmp_path / "data" / "training").mkdir(parents=True)
    (tmp_path / "data" / "training" / "test_002.tif").touch()
    done = _run("camelyon16", table, tmp_path / "out" / "m.csv", "--slides", tmp_path / "data")
    assert done.returncode == 0
    assert "1 slides of the table are not in" in done.stdout
    assert "normal_001" in done.stdout
    found = rows(tmp_path / "out" / "m.csv")
    assert [row["slide"] for row in found] == ["../data/training/test_002.tif"]


@pytest.mark.parametrize(
    ("recipe", "content", "message"),
    [
        ("camelyon16", "a,b\n1,2\n", "no column center; its columns are a, b"),
        ("camelyon16", "image,type,class,center\nx.tif,odd,,0\n", "type is 'odd'"),
        ("tcga", "slide,subtype\nS-1,a\n", "S-1 is no TCGA slide"),
        ("tcga", "slide,subtype,patient\nTCGA-83-5908-01Z-00-DX1.38,a,TCGA-83-0000\n", "the barcode TCGA-83-5908"),
    ],
)
def test_wrong_tables_are_one_line(tmp_path: Path, recipe: str, content: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(content)
    done = _run(recipe, tmp_path / "t.csv", tmp_path / "m.csv")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert _run(recipe, tmp_path / "none.csv", tmp_path / "m.csv").returncode == 2
