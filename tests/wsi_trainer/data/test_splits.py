"""Splits keep patients together and classes in proportion."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wsi_trainer.data.manifest import SlideRecord, read_manifest
from wsi_trainer.data.splits import check_leakage, complete_splits, divide
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


def test_shares_are_about_what_was_asked_for() -> None:
    result = complete_splits([record(i, i, i % 2) for i in range(200)], validation=0.1, test=0.25)
    counts = {split: sum(r.split == split for r in result) for split in ("train", "val", "test")}
    assert counts["test"] == 50 and 15 <= counts["val"] <= 25


def test_the_manifest_decides_and_only_val_is_taken_from_train() -> None:
    records = [record(i, i, i % 2, "test" if i < 10 else "train") for i in range(40)]
    result = complete_splits(records, validation=0.2)
    assert [r.split for r in result[:10]] == ["test"] * 10
    assert sum(r.split == "val" for r in result) == 6


def test_another_seed_gives_other_splits_and_the_same_seed_the_same() -> None:
    records = [record(i, i, i % 2) for i in range(40)]
    assert complete_splits(records, seed=1) == complete_splits(records, seed=1)
    assert complete_splits(records, seed=1) != complete_splits(records, seed=2)


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


def test_a_manifest_with_several_labels_is_split_label_by_label() -> None:
    records = [replace(record(i, i, 0), marks=("rare",) if i < 10 else ()) for i in range(100)]
    result = complete_splits(records, validation=0.2, test=0.2)
    counts = {split: sum(bool(r.marks) for r in result if r.split == split) for split in ("train", "val", "test")}
    assert counts == {"train": 6, "val": 2, "test": 2}


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
