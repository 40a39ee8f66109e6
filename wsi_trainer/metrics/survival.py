"""Predictions of risk, their scores, and the survival curve of a group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.metrics.scores import Score
from wsi_trainer.metrics.table import (
    Columns,
    PredictionsError,
    check_rows,
    owners_of_rows,
    read_rows,
    rows_of_patients,
    write_rows,
)


@dataclass(frozen=True)
class RiskPredictions:
    """Time, event and predicted risk, one row for each slide (or each patient)."""

    slides: tuple[str, ...]
    patients: tuple[str, ...]
    times: NDArray[np.float64]
    """(rows,) time of the event, or the last time it was known not to have happened."""
    events: NDArray[np.bool_]
    """(rows,) whether it happened."""
    risks: NDArray[np.float64]
    """(rows,) the higher, the earlier the event is expected."""
    sites: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_rows(len(self.slides), self.patients, self.sites)
        for name in ("times", "events", "risks"):
            if getattr(self, name).shape != (len(self),):
                raise PredictionsError(f"{len(self)} slides have {name} of shape {getattr(self, name).shape}")

    def __len__(self) -> int:
        return len(self.slides)

    @property
    def truth(self) -> NDArray[np.float64]:
        """What is true of each row: times and events."""
        return np.stack([self.times, self.events], axis=1)

    def take(self, rows: NDArray[np.int64]) -> RiskPredictions:
        """The rows with these indices, in this order, repeats included."""
        owners = owners_of_rows(self, rows)
        return replace(self, **owners, times=self.times[rows], events=self.events[rows], risks=self.risks[rows])

    def by_patient(self) -> RiskPredictions:
        """One row for each patient: the highest risk of the slides, which have to agree on time and event."""
        rows = rows_of_patients(self.patients)
        for name, index in rows.items():
            if len(set(zip(self.times[index].tolist(), self.events[index].tolist()))) > 1:
                raise PredictionsError(f"the slides of patient {name} have different times or events")
        first = self.take(np.array([index[0] for index in rows.values()]))
        risks = np.array([self.risks[index].max() for index in rows.values()])
        return replace(first, slides=first.patients, risks=risks)

    def write(self, path: Path) -> None:
        """Write the CSV file: slide, patient, time, event (0 or 1), risk."""
        write_rows(path, self, *self.columns())

    def columns(self) -> Columns:
        """The columns of the file that are of this kind."""
        return ["time", "event", "risk"], np.stack([self.times, self.events.astype(float), self.risks], axis=1).tolist()

    @staticmethod
    def read(path: Path) -> RiskPredictions:
        """Read what `write` wrote."""
        table = read_rows(path)
        times, events, risks = table.numbers(["time", "event", "risk"]).T
        return RiskPredictions(
            table.texts("slide"), table.texts("patient"), times, events.astype(bool), risks, table.sites
        )


def c_index(predictions: RiskPredictions) -> float:
    """Harrell's C: of the pairs in which one is known to have had the event first, those where it has the higher risk.

    A tie in risk counts half. NaN where no pair can be compared.
    """
    times, events, risks = predictions.times, predictions.events, predictions.risks
    earlier = times[:, None] < times
    # Who had the event at the very time the other one was last seen without had it first.
    earlier |= (times[:, None] == times) & ~events
    comparable = earlier & events[:, None]
    pairs = int(comparable.sum())
    if not pairs:
        return float("nan")
    higher = (risks[:, None] > risks) + 0.5 * (risks[:, None] == risks)
    return float(higher[comparable].sum() / pairs)


RISK_SCORES: Mapping[str, Score] = {"c_index": c_index}


def kaplan_meier(
    times: NDArray[np.float64], events: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The times of the events, from 0 on, and the share that the estimator expects to be without event after each."""
    happened = np.unique(times[events])
    at_risk = (times[:, None] >= happened).sum(axis=0)
    died = ((times[:, None] == happened) & events[:, None]).sum(axis=0)
    return np.append(0.0, happened), np.append(1.0, np.cumprod(1 - died / at_risk))
