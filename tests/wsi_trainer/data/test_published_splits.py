"""Splits as CLAM and Patho-Bench publish them, and what of them would leak."""

from __future__ import annotations

from pathlib import Path

import pytest

from wsi_trainer.data.datamodule import SlideData
from wsi_trainer.data.dataset import DataConfig
from wsi_trainer.errors import UserError

CLAM = ",train,val,test\n0,s0,s2,s4\n1,s1,s3,s5\n2,s6,,\n"
BOOLEAN = ",train,val,test\n" + "".join(f"s{i},{i in (0, 1, 6)},{i in (2, 3)},{i in (4, 5)}\n" for i in range(7))
BENCH = "case_id\tslide_id\tlabel\tfold_0\tfold_1\n" + "".join(
    f"p{i}\ts{i}\t{i % 2}\t{'test' if i in (4, 5) else 'val' if i in (2, 3) else 'train'}\t"
    f"{'test' if i < 2 else 'train'}\n"
    for i in range(7)
)
EXPECTED = ["train", "train", "val", "val", "test", "test", "train"]


def splits(folder: Path, name: str, text: str, fold: int = 0, patients: str = "0123456") -> list[str]:
    (folder / name).write_text(text)
    lines = [f"s{i}.svs,{i % 2},p{patient}" for i, patient in enumerate(patients)]
    (folder / "manifest.csv").write_text("\n".join(["slide,label,patient", *lines]) + "\n")
    for number in range(7):
        (folder / f"s{number}.svs").touch()
    config = DataConfig(manifest=folder / "manifest.csv", splits=folder / name, fold=fold)
    return [record.split for record in SlideData(config, ["0", "1"]).records]


@pytest.mark.parametrize(
    ("name", "text"), [("splits_0.csv", CLAM), ("splits_0_bool.csv", BOOLEAN), ("k=all.tsv", BENCH)]
)
def test_the_splits_of_a_file_are_taken_as_they_are(name: str, text: str, tmp_path: Path) -> None:
    assert splits(tmp_path, name, text) == EXPECTED


def test_another_fold_without_val_gives_up_a_part_of_train(tmp_path: Path) -> None:
    found = splits(tmp_path, "k=all.tsv", BENCH, fold=1)
    assert found[:2] == ["test", "test"]
    assert set(found[2:]) == {"train", "val"}


@pytest.mark.parametrize(
    ("name", "text", "fold", "patients", "message"),
    [
        ("splits_0.csv", CLAM, 0, "0123056", r"patient p0 has slides in two splits: s0\.svs in train, s4\.svs in test"),
        ("splits_0.csv", CLAM.replace("s5", "s0"), 0, "0123456", "slide s0 is in test and in train"),
        ("splits_0.csv", CLAM.replace("s6", "s7"), 0, "0123456", r"lacks slide s6\.svs"),
        ("splits_0.csv", CLAM, 2, "0123456", "one fold of CLAM's; give the file of fold 2"),
        ("k=all.tsv", BENCH, 7, "0123456", "has no column 'fold_7'"),
        ("k=all.tsv", BENCH.replace("val", "tune"), 0, "0123456", "slide s2 is in 'tune'"),
        ("other.csv", "a,b\n1,2\n", 0, "0123456", "is no file of splits"),
    ],
)
def test_what_leaks_or_is_something_else_is_refused(
    name: str, text: str, fold: int, patients: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        splits(tmp_path, name, text, fold, patients)
