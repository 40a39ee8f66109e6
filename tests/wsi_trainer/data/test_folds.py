"""Folds hold out each slide once, keep patients and sites whole, and survive a file."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.data.splits import changes_since, complete_splits, folds, read_splits, write_folds
from wsi_trainer.errors import UserError


def record(slide: str, patient: int, label: int, split: str = "", site: str = "") -> SlideRecord:
    return SlideRecord(slide, Path(f"/slides/{slide}"), str(label), f"p{patient}", split, site)


def cohort(sizes: list[int], sites: int = 0) -> list[SlideRecord]:
    return [
        record(f"{p}-{i}", p, p // 2 % 2, site=f"site{p % sites}" if sites else "")
        for p, size in enumerate(sizes)
        for i in range(size)
    ]


@given(st.lists(st.integers(1, 4), min_size=24, max_size=40), st.integers(2, 5), st.integers(0, 1000))
def test_each_slide_is_held_out_once_and_patients_stay_whole(sizes: list[int], n: int, seed: int) -> None:
    records = cohort(sizes)
    held: list[str] = []
    for fold in folds(records, n, seed=seed):
        assert [r.slide for r in fold] == [r.slide for r in records]
        splits = {split: {r.patient for r in fold if r.split == split} for split in ("train", "val", "test")}
        assert all(splits.values())
        assert sum(map(len, splits.values())) == len(sizes)  # no patient in two
        assert {r.label for r in fold if r.split == "test"} == {"0", "1"}
        held += [r.slide for r in fold if r.split == "test"]
    assert sorted(held) == sorted(r.slide for r in records)


def test_parts_are_about_equal_and_classes_in_proportion() -> None:
    records = [record(str(i), i, int(i % 4 == 0)) for i in range(100)]
    for fold in folds(records, 5, seed=1):
        test = [r for r in fold if r.split == "test"]
        assert len(test) == 20 and sum(r.label == "1" for r in test) == 5


def test_no_site_is_in_two_splits() -> None:
    for fold in folds(cohort([2] * 60, sites=9), 4, by="site", seed=2):
        sites = [{r.site for r in fold if r.split == split} for split in ("train", "val", "test")]
        assert all(sites) and sum(map(len, sites)) == 9
    whole = complete_splits(cohort([2] * 60, sites=9), by="site")
    assert sum(len({r.site for r in whole if r.split == split}) for split in ("train", "val", "test")) == 9


def test_an_official_test_split_stays_and_the_held_out_part_is_val() -> None:
    records = [record(str(i), i, i % 2, "test" if i < 10 else ("val" if i < 14 else "train")) for i in range(40)]
    held: list[str] = []
    for fold in folds(records, 3):
        assert [r.slide for r in fold if r.split == "test"] == [str(i) for i in range(10)]
        held += [r.slide for r in fold if r.split == "val"]
    assert sorted(held, key=int) == [str(i) for i in range(10, 40)]


def test_the_same_seed_gives_the_same_folds() -> None:
    records = cohort([1] * 40)
    assert folds(records, 4, seed=3) == folds(records, 4, seed=3) != folds(records, 4, seed=4)


def test_folds_come_back_from_their_files(tmp_path: Path) -> None:
    divided = folds(cohort([2] * 20, sites=5), 3)
    paths = write_folds(tmp_path, divided)
    assert [path.name for path in paths] == ["fold0.csv", "fold1.csv", "fold2.csv"]
    for path, fold in zip(paths, divided):
        assert read_splits(path) == fold


def test_an_edited_file_is_checked_again(tmp_path: Path) -> None:
    (fold, *_) = folds(cohort([2] * 20), 3)
    (path,) = write_folds(tmp_path, [fold])
    text = path.read_text()
    first = next(r for r in fold if r.split == "train")
    line = next(line for line in text.splitlines() if line.startswith(f"{first.slide},"))
    path.write_text(text.replace(line, line.replace(",train,", ",test,")))
    with pytest.raises(UserError, match=rf"fold0\.csv: patient {first.patient} has slides in two splits"):
        read_splits(path)
    path.write_text(text.replace(line, line.replace(",train,", ",,")))
    with pytest.raises(UserError, match=f"slide {first.slide} has no split"):
        read_splits(path)
    with pytest.raises(UserError, match="patient p0 has slides in two splits"):
        write_folds(tmp_path, [[replace(fold[0], split="val"), replace(fold[1], split="test")]])


def test_impossible_folds_say_why() -> None:
    with pytest.raises(UserError, match="1 folds were asked for"):
        folds(cohort([1] * 20), 1)
    with pytest.raises(UserError, match="class '1' has 2 patients, which is too few for 3 parts"):
        folds([record(str(i), i, int(i < 2)) for i in range(20)], 3)
    with pytest.raises(UserError, match="there are 2 sites, which is too few for 3 parts"):
        folds(cohort([1] * 20, sites=2), 3, by="site")
    with pytest.raises(UserError, match="has no site"):
        folds(cohort([1] * 20), 3, by="site")
    with pytest.raises(UserError, match=r"patient p1 has slides from two sites: a from x, b from y"):
        folds([record("a", 1, 0, site="x"), record("b", 1, 0, site="y")], 2, by="site")
    with pytest.raises(UserError, match="patient p1 has slides in two splits"):
        folds([record("a", 1, 0, "test"), record("b", 1, 0, "train")], 2)


def test_sites_of_a_real_cohort(shared_data: Path) -> None:
    """TCGA lung: 941 slides of two classes from many sites, some with a single slide."""
    with (shared_data / "labels" / "tcga_lung_labels.csv").open(newline="") as file:
        records = [
            SlideRecord(row["slide"], Path(row["slide"]), row["subtype"], row["patient"], "", row["site"])
            for row in csv.DictReader(file)
        ]
    held: list[str] = []
    for fold in folds(records, 5, by="site"):
        sites = [{r.site for r in fold if r.split == split} for split in ("train", "val", "test")]
        assert sum(map(len, sites)) == len({r.site for r in records})
        test = [r for r in fold if r.split == "test"]
        assert 0.12 < len(test) / len(records) < 0.28
        assert 0.25 < sum(r.label == "squamous" for r in test) / len(test) < 0.75
        held += [r.slide for r in test]
    assert sorted(held) == sorted(r.slide for r in records)


def test_a_manifest_that_has_changed_is_told_in_sentences() -> None:
    kept = [replace(record, split="train", label="0") for record in cohort([1] * 4)]
    grown = [replace(kept[0], label="1"), replace(kept[1], split="test"), kept[2], replace(kept[3], slide="new")]
    assert changes_since(kept, grown, ["label"]) == [
        "1 slide new in the manifest since the run began, left out: new",
        f"1 slide no longer in the manifest, kept by the run: {kept[3].slide}",
        f"1 slide with another label in the manifest; the run keeps the label it began with: {kept[0].slide}",
        f"1 slide in another split in the manifest; the run keeps the split it began with: {kept[1].slide}",
    ]
    assert changes_since(kept, [replace(record, split="") for record in reversed(kept)], ["label"]) == []
