"""Splits keep patients together and classes in proportion."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wsi_trainer.data.datamodule import EpochSampler, SlideData
from wsi_trainer.data.dataset import DataConfig
from wsi_trainer.data.manifest import SlideRecord, read_manifest
from wsi_trainer.data.splits import (
    changes_since,
    check_leakage,
    complete_splits,
    divide,
    folds,
    read_splits,
    write_folds,
)
from wsi_trainer.errors import UserError


def record(slide: int, patient: int, label: int, split: str = "") -> SlideRecord:
    return SlideRecord(f"s{slide}", Path(f"s{slide}"), str(label), f"p{patient}", split)


@given(st.lists(st.integers(1, 4), min_size=20, max_size=40), st.integers(0, 1000))
def test_no_patient_is_in_two_splits_and_each_slide_in_one(sizes: list[int], seed: int) -> None:
    records = [record(10 * p + i, p, p % 2) for p, size in enumerate(sizes) for i in range(size)]
    result = complete_splits(records, seed=seed)
    assert [r.slide for r in result] == [r.slide for r in records]
    assert {r.split for r in result} == {"train", "val", "test"}
    check_leakage(result)
    for split in ("train", "val", "test"):
        assert {r.label for r in result if r.split == split} == {"0", "1"}


def test_the_manifest_decides_and_only_val_is_taken_from_train() -> None:
    records = [record(i, i, i % 2, "test" if i < 10 else "train") for i in range(40)]
    result = complete_splits(records, validation=0.2)
    assert [r.split for r in result[:10]] == ["test"] * 10
    assert sum(r.split == "val" for r in result) == 6


def test_leakage_half_given_splits_and_lonely_classes_are_named() -> None:
    with pytest.raises(UserError, match="patient p1 has slides in two splits: s1 in train, s2 in test"):
        check_leakage([record(1, 1, 0, "train"), record(2, 1, 0, "test")])
    with pytest.raises(UserError, match="1 of 2 slides have no split, the first is s2"):
        complete_splits([record(1, 1, 0, "train"), record(2, 2, 1)])
    with pytest.raises(UserError, match="a class has a single patient"):
        complete_splits([record(i, i, int(i == 0)) for i in range(9)])
    with pytest.raises(UserError, match="no slide is in the split train"):
        complete_splits([record(1, 1, 0, "val"), record(2, 2, 1, "val")])


@settings(max_examples=20)
@given(st.integers(0, 1000), st.sampled_from([3, 5]))
def test_each_of_several_labels_is_kept_in_proportion(seed: int, parts: int) -> None:
    rng = np.random.default_rng(seed)
    names, shares = ("a", "b", "rare"), (0.5, 0.2, 0.06)
    patients = [tuple(n for n, share in zip(names, shares) if rng.random() < share) for _ in range(150)]
    records = [
        replace(record(2 * p + i, p, 0), marks=marks) for p, marks in enumerate(patients) for i in range(1 + p % 2)
    ]
    divided = divide(records, parts, seed)
    assert sorted(row for part in divided for row in part) == list(range(len(records)))
    assert divided == divide(records, parts, seed)
    assert sum(len({records[row].patient for row in part}) for part in divided) == 150  # nobody is in two parts
    for name in names:
        counts = [sum(name in records[row].marks for row in part) for part in divided]
        assert max(counts) - min(counts) <= 2, name  # a patient has two slides at most
    sizes = [len(part) for part in divided]
    assert max(sizes) - min(sizes) <= 4


@pytest.mark.parametrize("share", [0.04, 0.1, 0.3, 0.4, 0.6, 0.7, 0.8])
def test_shares_are_those_that_were_asked_for(share: float) -> None:
    result = complete_splits([record(i, i, i % 2) for i in range(200)], validation=0.1, test=share)
    assert sum(r.split == "test" for r in result) / 200 == pytest.approx(share, abs=0.015)


def test_a_share_that_so_few_patients_do_not_give_is_named(caplog: pytest.LogCaptureFixture) -> None:
    complete_splits([record(i, i, int(i < 3)) for i in range(30)], validation=0.2, test=0.2)
    assert "1 of 3 parts are the split test, where 0.2 was asked for: the rarest class has 3 patients" in caplog.text


@pytest.mark.parametrize(("one", "other"), [("0000{}", "{}"), ("{}", "{}.0"), ("P{}", "p{}"), ("P0{}", "P{}")])
def test_a_patient_in_two_spellings_is_one_to_splits_and_told(
    one: str, other: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [f"s{i}_{j},{i % 2},{text.format(i)}" for i in range(1, 21) for j, text in enumerate((one, other))]
    path = tmp_path / "m.csv"
    path.write_text("slide,label,patient\n" + "\n".join(lines) + "\n")
    records = read_manifest(path)
    assert f"writes 20 patients in several ways, such as {one.format(1)} and {other.format(1)}" in caplog.text
    for seed in range(5):
        splits: dict[str, set[str]] = {}
        for r in complete_splits(records, seed=seed):
            splits.setdefault(r.slide.split("_")[0], set()).add(r.split)
        assert all(len(found) == 1 for found in splits.values())


# -- folds hold out each slide once, keep patients and sites whole, and survive a file


def member(slide: str, patient: int, label: int, split: str = "", site: str = "") -> SlideRecord:
    return SlideRecord(slide, Path(f"/slides/{slide}"), str(label), f"p{patient}", split, site)


def cohort(sizes: list[int], sites: int = 0) -> list[SlideRecord]:
    return [
        member(f"{p}-{i}", p, p // 2 % 2, site=f"site{p % sites}" if sites else "")
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


def test_an_official_test_split_stays_and_the_held_out_part_is_val() -> None:
    records = [member(str(i), i, i % 2, "test" if i < 10 else ("val" if i < 14 else "train")) for i in range(40)]
    held: list[str] = []
    for fold in folds(records, 3):
        assert [r.slide for r in fold if r.split == "test"] == [str(i) for i in range(10)]
        held += [r.slide for r in fold if r.split == "val"]
    assert sorted(held, key=int) == [str(i) for i in range(10, 40)]


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
        folds([member(str(i), i, int(i < 2)) for i in range(20)], 3)
    with pytest.raises(UserError, match="there are 2 sites, which is too few for 3 parts"):
        folds(cohort([1] * 20, sites=2), 3, by="site")
    with pytest.raises(UserError, match="has no site"):
        folds(cohort([1] * 20), 3, by="site")
    with pytest.raises(UserError, match=r"patient p1 has slides from two sites: a from x, b from y"):
        folds([member("a", 1, 0, site="x"), member("b", 1, 0, site="y")], 2, by="site")
    with pytest.raises(UserError, match="patient p1 has slides in two splits"):
        folds([member("a", 1, 0, "test"), member("b", 1, 0, "train")], 2)


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
    kept = [replace(member, split="train", label="0") for member in cohort([1] * 4)]
    grown = [replace(kept[0], label="1"), replace(kept[1], split="test"), kept[2], replace(kept[3], slide="new")]
    assert changes_since(kept, grown, ["label"]) == [
        "1 slide new in the manifest since the run began, left out: new",
        f"1 slide no longer in the manifest, kept by the run: {kept[3].slide}",
        f"1 slide with another label in the manifest; the run keeps the label it began with: {kept[0].slide}",
        f"1 slide in another split in the manifest; the run keeps the split it began with: {kept[1].slide}",
    ]
    assert changes_since(kept, [replace(member, split="") for member in reversed(kept)], ["label"]) == []


# -- splits as CLAM, Patho-Bench and STAMP publish them, and what of them would leak


CLAM = ",train,val,test\n0,s0,s2,s4\n1,s1,s3,s5\n2,s6,,\n"
BOOLEAN = ",train,val,test\n" + "".join(f"s{i},{i in (0, 1, 6)},{i in (2, 3)},{i in (4, 5)}\n" for i in range(7))
BENCH = "case_id\tslide_id\tlabel\tfold_0\tfold_1\n" + "".join(
    f"p{i}\ts{i}\t{i % 2}\t{'test' if i in (4, 5) else 'val' if i in (2, 3) else 'train'}\t"
    f"{'test' if i < 2 else 'train'}\n"
    for i in range(7)
)
STAMP = """{"splits": [
    {"train_patients": ["p0", "p1", "p2", "p3", "p4"], "test_patients": ["P05", "p6"]},
    {"train_patients": ["p5", "p6", "p2", "p3", "p4"], "test_patients": ["p0", "p1"]}
]}"""
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


def test_folds_of_stamp_are_of_patients(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = splits(tmp_path, "splits.json", STAMP, fold=1, patients="0023456")
    assert found[:2] == ["test", "test"], "slides of one patient"
    assert set(found[2:]) == {"train", "val"}
    assert "has 1 patients that the manifest lacks, the first is p1" in caplog.text
    assert [name == "test" for name in splits(tmp_path, "splits.json", STAMP)] == [False] * 5 + [True] * 2


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
        ("other.json", "[1]", 0, "0123456", "is no file of splits"),
        ("splits.json", STAMP, 2, "0123456", "has 2 folds, and data.fold is 2"),
        ("splits.json", STAMP.replace("p6", "p0"), 0, "0123456", "patient p0 is in train and in test"),
        ("splits.json", STAMP, 0, "0123457", "lacks patient p7"),
    ],
)
def test_what_leaks_or_is_something_else_is_refused(
    name: str, text: str, fold: int, patients: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        splits(tmp_path, name, text, fold, patients)


# -- the order of slides: a function of the seed and the epoch, balanced where asked for, continued in the middle


STRATA = ["a"] * 17 + ["b"] * 3 + ["c"] * 10


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=40), st.integers(0, 99))
def test_shares_differ_by_one_visit_at_most(strata: list[str], seed: int) -> None:
    sampler = EpochSampler(len(strata), seed, strata=strata)
    for _ in range(3):
        order = [visit.slide for visit in sampler]
        assert len(order) == len(strata) == len(sampler)
        shares = Counter(strata[slide] for slide in order)
        every = [shares[name] for name in set(strata)]
        assert max(every) - min(every) <= 1


@pytest.mark.parametrize("strata", [None, STRATA])
def test_a_run_continued_in_the_middle_of_an_epoch_is_the_same_run(strata: list[str] | None) -> None:
    whole = EpochSampler(30, seed=1, strata=strata)
    expected = [*whole, *whole]
    again = EpochSampler(30, seed=1, strata=strata)
    again.epoch, again.skip = 0, 12
    assert [*again, *again] == expected[12:]
