"""`Decision`: where a probability becomes a class, and how that threshold is chosen on validation slides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.errors import UserError

MOST_PROBABLE = "argmax"
"""The rule without a threshold."""
BEST = ("balanced_accuracy", "youden", "f1")
"""Rules that take the threshold with the highest score on the validation slides; Youden's index is twice the balanced
accuracy, less 1.
"""
AT_LEAST = ("sensitivity", "specificity")
"""Rules that take the threshold that still reaches a share of the validation slides: `sensitivity:0.95`."""
EVEN = float(np.nextafter(0.5, 1))
"""The threshold that decides for the more probable of two classes, where slides are of one class and tell none."""
COST = "cost"
"""Rule that takes the threshold with the least cost, where a missed positive costs so many false alarms: `cost:10`."""
Floats = NDArray[np.float64]


def decide(probabilities: Floats, thresholds: Floats | None) -> NDArray[np.int64]:
    """The class of each row of (rows, classes) probabilities: the most probable one, or the second from a threshold on.

    Args:
        probabilities: Those of each class.
        thresholds: (rows,) probabilities of the second of two classes; None takes the most probable class.
    """
    if thresholds is None:
        return np.asarray(probabilities.argmax(axis=1), np.int64)
    return (probabilities[:, 1] >= thresholds).astype(np.int64)


@dataclass(frozen=True)
class Decision:
    """The operating point of a target: a value that goes with a run from validation to test, cohorts and reports."""

    thresholds: tuple[float, ...] = ()
    """The probability from which on it is decided for the second of two classes, or for each of several labels; without
    any, for what is most probable.
    """
    rule: str = MOST_PROBABLE
    """How they were chosen, as in `train.decision`."""

    def sentences(self, classes: Sequence[str]) -> list[str]:
        """Sentences on what is decided for, and from where on.

        Args:
            classes: Two classes, or the labels.
        """
        named = list(classes)[-len(self.thresholds) :] if self.thresholds else []
        return [
            f"decided for {name} from a probability of {cut:.3f} on (train.decision: {self.rule})"
            for name, cut in zip(named, self.thresholds, strict=True)
        ]

    def record(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return {"thresholds": list(self.thresholds), "rule": self.rule}

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Self:
        """A decision from its fields."""
        return cls(tuple(float(one) for one in record["thresholds"]), str(record["rule"]))


def decisions_record(rule: str, decisions: Mapping[str, Decision]) -> dict[str, Any]:
    """The decisions of targets by a rule, for JSON."""
    return {"rule": rule, "targets": {name: one.record() for name, one in decisions.items()}}


def read_decisions(record: Mapping[str, Any], rule: str) -> dict[str, Decision] | None:
    """The decisions in a record; None in one of another rule, or in an empty one."""
    if record.get("rule") != rule:
        return None
    return {name: Decision.read(one) for name, one in record["targets"].items()}


def check_rule(rule: str) -> str:
    """The rule, or an error where there is none of that name."""
    name, colon, share = rule.partition(":")
    if colon:
        value = _number(share) or 0
        valid = (name in AT_LEAST and 0 < value <= 1) or (name == COST and value > 0)
    else:
        valid = rule in (MOST_PROBABLE, *BEST) or 0 < (_number(rule) or 0) < 1
    if not valid:
        raise UserError(
            f"train.decision is {rule!r}; it is argmax, a probability between 0 and 1, {', '.join(BEST)}, "
            f"{', '.join(f'{name}:0.95' for name in AT_LEAST)}, or {COST}:10, where a missed positive costs ten false "
            "alarms"
        )
    return rule


def fixed(rule: str) -> float | None:
    """The threshold that a rule is by itself; None where validation slides are asked."""
    return _number(rule)


def threshold(truth: NDArray[np.bool_], probability: Floats, rule: str) -> float:
    """The threshold that a rule takes on these slides; NaN where they are all of one class.

    It lies halfway between two predicted probabilities. Of several that are equally good it is the one nearest to 0.5.

    Args:
        truth: (rows,) whether the label is the class.
        probability: (rows,) the probability of the class.
        rule: As `train.decision` has it.
    """
    if (given := fixed(rule)) is not None:
        return given
    positive, negative = np.sort(probability[truth]), np.sort(probability[~truth])
    if not len(positive) or not len(negative):
        return float("nan")
    values = np.unique(probability)
    cuts = (values[:-1] + values[1:]) / 2
    cuts = np.array(
        [
            values[0],
            *np.where(cuts > values[:-1], cuts, values[1:]),
            max((values[-1] + 1) / 2, np.nextafter(values[-1], 2)),
        ]
    )
    right = len(positive) - np.searchsorted(positive, cuts, "left")
    wrong = len(negative) - np.searchsorted(negative, cuts, "left")
    sensitivity, specificity = right / len(positive), 1 - wrong / len(negative)
    name, _, share = rule.partition(":")
    if name == "sensitivity":
        return float(cuts[sensitivity >= float(share) - 1e-12].max())
    if name == "specificity":
        return float(cuts[specificity >= float(share) - 1e-12].min())
    if name == "f1":
        good = 2 * right / (right + wrong + len(positive))
    elif name == COST:
        good = float(share) * right - wrong
    else:
        good = (sensitivity + specificity) / 2
    best = cuts[good >= good.max() - 1e-12]
    return float(best[np.abs(best - 0.5).argmin()])


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) else None
