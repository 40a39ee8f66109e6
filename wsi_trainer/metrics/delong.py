"""DeLong's variance of an AUC, and of the difference of two AUCs on the same slides.

DeLong, DeLong and Clarke-Pearson (Biometrics 1988). Where patients have several slides it is that of Obuchowski
(Biometrics 1997), whose units are patients; with one slide each the two are the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def placements(truth: NDArray[np.bool_], said: Floats) -> Floats:
    """Of each true row the share of false rows below it, of each false row that of true rows above; ties count half."""
    found = np.empty(len(said))
    for rows, others, sign in ((truth, ~truth, 1), (~truth, truth, -1)):
        ordered = np.sort(sign * said[others])
        mine = sign * said[rows]
        below = np.searchsorted(ordered, mine, "left") + np.searchsorted(ordered, mine, "right")
        found[rows] = below / (2 * len(ordered))
    return found


def auc_covariance(
    truth: NDArray[np.bool_], said: Sequence[Floats], patients: Sequence[Hashable]
) -> tuple[Floats, Floats]:
    """The AUC of each of several predictions of the same rows, and the covariance of these.

    Args:
        truth: (rows,) whether the row is of the class; both kinds have to be there.
        said: (rows,) numbers of each prediction, the higher the more probable.
        patients: The patient of each row.
    """
    owners, place = np.unique(np.asarray(patients), return_inverse=True)
    values = np.array([placements(truth, one)[truth].mean() for one in said])
    parts = []
    for rows in (truth, ~truth):
        apart = [
            np.bincount(place[rows], placements(truth, one)[rows] - a, len(owners)) for one, a in zip(said, values)
        ]
        parts.append(np.array(apart) / rows.sum())
    counts = [len(set(place[rows])) for rows in (truth, ~truth)]
    total = sum(_scale(count) * part @ part.T for count, part in zip(counts, parts))
    cross = _scale(len(owners)) * parts[0] @ parts[1].T
    return values, total + cross + cross.T


def _scale(count: int) -> float:
    return count / (count - 1) if count > 1 else np.nan
