"""Labels are balanced, patients stay together, splits are stratified."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from wsi_trainer.synthetic import make_cohort


@pytest.mark.parametrize("slides", [6, 40, 61, 200])
@pytest.mark.parametrize("seed", [0, 7])
def test_balance_and_grouping(slides: int, seed: int) -> None:
    members = make_cohort(slides, seed)
    assert [m.slide for m in members] == list(range(slides))
    assert sum(m.label for m in members) == slides // 2
    by_patient = defaultdict(set)
    for member in members:
        by_patient[member.patient].add((member.label, member.split))
    assert all(len(kinds) == 1 for kinds in by_patient.values())
    if slides >= 40:
        assert max(Counter(m.patient for m in members).values()) > 1


@pytest.mark.parametrize("slides", [40, 61, 200])
def test_splits_have_their_share_of_each_label(slides: int) -> None:
    members = make_cohort(slides, 3)
    for label in (0, 1):
        counts = Counter(m.split for m in members if m.label == label)
        for split, share in (("train", 0.6), ("val", 0.2), ("test", 0.2)):
            assert abs(counts[split] - share * slides / 2) <= 2


def test_numbers_do_not_tell_the_label() -> None:
    members = make_cohort(400, 1)
    first = sum(m.label for m in members[:200])
    assert 70 < first < 130
    assert make_cohort(400, 2) != members


def test_other_splits() -> None:
    members = make_cohort(20, 0, {"train": 0.5, "test": 0.5})
    assert Counter(m.split for m in members).keys() == {"train", "test"}
