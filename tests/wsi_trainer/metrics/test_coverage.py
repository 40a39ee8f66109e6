"""Coverage of 95 % intervals in simulated studies, by patients, slides of a patient and true AUC.

`pytest --full tests/wsi_trainer/metrics/test_coverage.py` writes `benchmarks/results/coverage.json`: the share of the
studies with an interval in which it holds the truth, and how many had one. A sampled run tries one place.

Newcombe's intervals (`auc`, and the difference `auc_apart`) hold more than 97 % in some places: near 1, and where
slides count as patients. Those of resamples (`brier`, `balanced_accuracy`) hold 58 to 92 % of ten patients, or of a
Brier score that few patients make: a resample cannot have an error that no patient had.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from wsi_trainer.metrics import (
    ClassPredictions,
    Interval,
    auc,
    delong_difference,
    paired_difference,
    score_intervals,
    unpaired_difference,
)
from wsi_trainer.metrics.calibration import recalibration
from wsi_trainer.metrics.classes import balanced_accuracy, brier
from wsi_trainer.metrics.operating import delong, operating_point

PATIENTS, AREAS, SLIDES = (10, 20, 50, 200), (0.6, 0.9, 0.99), (1, 4)
RESAMPLED = {"brier": brier, "balanced_accuracy": balanced_accuracy}
LEAST_STUDIES = 0.2
"""Share of the studies that have an interval from which on a place is judged."""
STRICT = ("auc_delong", "auc_paired_delong", "calibration_intercept", "calibration_slope")
"""Intervals that hold 93 to 97 % wherever there is one in a fifth of the studies."""
UNEVEN = ("sensitivity", "specificity", "positive_predictive_value", "negative_predictive_value")
"""Wilson's intervals of shares hold 90 to 100 %, by the counts that there can be."""


def logits(generator: np.random.Generator, labels: np.ndarray, slides: int, area: float) -> np.ndarray:
    """Log odds that are calibrated for each slide; half of what is random is the patient's."""
    apart = norm.ppf(area) * 2**0.5
    own = generator.normal(size=(len(labels), slides)) * (0.5**0.5 if slides > 1 else 1)
    shared = generator.normal(size=(len(labels), 1)) * (0.5**0.5 if slides > 1 else 0)
    return np.asarray((apart * (own + shared + apart * (labels[:, None] - 0.5))).ravel())


def drawn_labels(generator: np.random.Generator, patients: int) -> np.ndarray:
    """Labels at random, so that prevalence varies between studies; of each class there is a patient."""
    labels = generator.integers(0, 2, patients)
    labels[:2] = 0, 1
    return labels


def study(labels: np.ndarray, logit: np.ndarray) -> ClassPredictions:
    slides = len(logit) // len(labels)
    p = 1 / (1 + np.exp(-logit))
    names = tuple(f"s{row}" for row in range(len(p)))
    owners = tuple(f"p{row // slides}" for row in range(len(p)))
    return ClassPredictions(names, owners, ("0", "1"), np.repeat(labels, slides), np.stack([1 - p, p], axis=1))


def truths(area: float) -> dict[str, float]:
    """True values that intervals should hold, by slide."""
    apart = norm.ppf(area) * 2**0.5
    x = np.linspace(-12, 12, 20001)
    p = 1 / (1 + np.exp(-apart * (x + apart / 2)))
    shares = {name: float(norm.cdf(apart / 2)) for name in ("sensitivity", "specificity", "balanced_accuracy")}
    shares |= {f"{sign}_predictive_value": shares["sensitivity"] for sign in ("positive", "negative")}
    squared = float(np.trapezoid((1 - p) ** 2 * norm.pdf(x), x))
    return shares | {
        "auc": area, "auc_delong": area, "auc_apart": 0.0, "auc_paired": 0.0, "auc_paired_delong": 0.0,
        "brier": squared, "calibration_intercept": 0.0, "calibration_slope": 1.0,
    }  # fmt: skip


def intervals(
    generator: np.random.Generator, patients: int, slides: int, area: float
) -> Iterator[tuple[str, Interval]]:
    labels = drawn_labels(generator, patients)
    first, second, other = (logits(generator, labels, slides, area) for _ in range(3))
    one, two = study(labels, first), study(labels, (first + second) / 2**0.5)
    alike = study(labels, (first + other) / 2**0.5)
    yield "auc", (found := score_intervals(one, {"auc": auc})["auc"])
    yield "auc_delong", delong(one)
    yield "auc_apart", unpaired_difference(found, score_intervals(study(labels, other), {"auc": auc})["auc"])
    yield "auc_paired_delong", delong_difference(two, alike)[0]
    yield from recalibration(one).items()
    yield from ((name, share) for name, share in operating_point(one).items() if name != "prevalence")


def resampled(
    generator: np.random.Generator, patients: int, slides: int, area: float
) -> Iterator[tuple[str, Interval]]:
    labels = drawn_labels(generator, patients)
    first, second, other = (logits(generator, labels, slides, area) for _ in range(3))
    yield from score_intervals(study(labels, first), RESAMPLED, count=400).items()
    two, alike = study(labels, (first + second) / 2**0.5), study(labels, (first + other) / 2**0.5)
    yield "auc_paired", paired_difference(two, alike, auc, count=400)


Drawn = Callable[[np.random.Generator, int, int, float], Iterator[tuple[str, Interval]]]


def coverage(drawn: Drawn, patients: int, slides: int, area: float, studies: int) -> dict[str, dict[str, Any]]:
    """By interval how often it was there, and how often it then held the truth."""
    truth, held, given, why = truths(area), dict[str, int](), dict[str, int](), dict[str, str]()
    for seed in range(studies):
        for name, one in drawn(
            np.random.default_rng([seed, patients, slides, int(1000 * area)]), patients, slides, area
        ):
            given.setdefault(name, 0)
            if one.absent:
                why[name] = one.absent
            else:
                given[name] += 1
                held[name] = held.get(name, 0) + (one.low <= truth[name] <= one.high)
    found = {name: {"studies": studies, "given": number} for name, number in given.items()}
    for name, number in given.items():
        found[name] |= {"coverage": round(held[name] / number, 4)} if number else {}
        found[name] |= {"absent": why[name]} if name in why else {}
    return found


def test_intervals_hold_the_truth_in_a_cohort_of_usual_size(count: Callable[..., int]) -> None:
    studies = count(ci=60, full=1000)
    found = coverage(intervals, 100, 1, 0.8, studies)
    worst = 0.93 - 3 * (0.95 * 0.05 / studies) ** 0.5
    assert {name: one for name, one in found.items() if one["given"] and one["coverage"] < worst} == {}
    assert all(one["given"] >= 0.9 * studies for one in found.values())


@pytest.mark.full
def test_coverage_of_all_intervals(record_result: Callable[[str, dict[str, Any]], None]) -> None:
    places, outside, wrong = {}, {}, {}
    for patients, slides, area in product(PATIENTS, SLIDES, AREAS):
        place = f"{patients} patients, {slides} slides each, AUC {area}"
        places[place] = coverage(intervals, patients, slides, area, 1000)
        if slides == 1 and patients < 200:
            places[place] |= coverage(resampled, patients, slides, area, 200)
        for name, one in places[place].items():
            if one["given"] < LEAST_STUDIES * one["studies"]:
                continue
            chance = 3 * (0.95 * 0.05 / one["given"]) ** 0.5
            if not 0.93 - chance <= one["coverage"] <= 0.97 + chance:
                outside[f"{name}, {place}"] = one["coverage"]
            if name in RESAMPLED:
                continue
            least = 0.9 if name in (*UNEVEN, "auc_paired") else 0.93
            if one["coverage"] < least - chance or (one["coverage"] > 0.97 + chance and name in STRICT):
                wrong[f"{name}, {place}"] = one["coverage"]
    record_result("coverage", {"places": places, "outside 93 to 97 % beyond chance": outside})
    assert wrong == {}
