"""The order of slides: a function of the seed and the epoch, balanced where asked for, continued in the middle."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wsi_trainer.data.datamodule import EpochSampler

STRATA = ["a"] * 17 + ["b"] * 3 + ["c"] * 10


def test_each_class_has_its_share_and_rare_slides_come_equally_often() -> None:
    sampler = EpochSampler(30, seed=5, strata=STRATA)
    epochs = [[visit.slide for visit in sampler] for _ in range(6)]
    for order in epochs:
        assert Counter(STRATA[slide] for slide in order) == {"a": 10, "b": 10, "c": 10}
        counts = Counter(order)
        assert {counts[slide] for slide in (17, 18, 19)} <= {3, 4}  # b: ten visits of three slides
        assert all(counts[slide] <= 1 for slide in range(17))
    assert set().union(*epochs) == set(range(30))  # no slide of the frequent class is left out for ever
    assert len({tuple(order) for order in epochs}) == 6


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


def test_ranks_share_a_balanced_epoch() -> None:
    shares = [[v.slide for v in EpochSampler(30, 2, rank, 4, STRATA)] for rank in range(4)]
    assert {len(share) for share in shares} == {8}
    whole = [v.slide for v in EpochSampler(30, 2, strata=STRATA)]
    merged = [shares[i % 4][i // 4] for i in range(30)]
    assert merged == whole


def test_strata_of_other_slides_are_refused() -> None:
    with pytest.raises(ValueError, match="3 strata for 4 slides"):
        EpochSampler(4, 0, strata=["a", "b", "c"])
