"""Every kind of prediction has a page that a browser shows without an error."""

from collections.abc import Callable, Mapping
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import tifffile

from wsi_trainer.data.manifest import SlideRecord, write_manifest
from wsi_trainer.fit.run import Run, environment
from wsi_trainer.io.files import write_json
from wsi_trainer.metrics import (
    MULTI_LABEL_SCORES,
    RISK_SCORES,
    SCORES,
    VALUE_SCORES,
    ClassPredictions,
    MultiLabelPredictions,
    Predictions,
    RiskPredictions,
    Score,
    ValuePredictions,
    Words,
    summarise,
)
from wsi_trainer.report import write_report

from .conftest import Browser

COUNT = 12
NAMES = tuple(f"slide {i}.tif" for i in range(COUNT))
PATIENTS = tuple(f"p{i // 2}" for i in range(COUNT))
SITES = tuple("AB"[i // 6] for i in range(COUNT))
RANDOM = np.random.default_rng(0)


def several() -> ClassPredictions:
    said = RANDOM.dirichlet([1, 1, 1], COUNT)
    return ClassPredictions(NAMES, PATIENTS, ("a", "b", "c"), np.arange(COUNT) // 2 % 3, said, SITES)


def multi_label() -> MultiLabelPredictions:
    labels = np.stack([np.arange(COUNT) % 2, np.arange(COUNT) // 2 % 2], axis=1).astype(float)
    labels[0, 1] = np.nan
    return MultiLabelPredictions(NAMES, PATIENTS, ("mutated", "high"), labels, RANDOM.random((COUNT, 2)), SITES)


def values() -> ValuePredictions:
    targets = np.linspace(0, 5, COUNT)
    return ValuePredictions(NAMES, PATIENTS, targets, targets + RANDOM.normal(size=COUNT), SITES)


def risks() -> RiskPredictions:
    times = np.arange(1.0, COUNT + 1).repeat(1)
    return RiskPredictions(NAMES, NAMES, times, np.arange(COUNT) % 3 > 0, -times + RANDOM.normal(size=COUNT), SITES)


KINDS: dict[str, tuple[Callable[[], Predictions], Mapping[str, Score], tuple[str, ...]]] = {
    "several": (several, SCORES, ("Confusion", "Results by class", "Results by site")),
    "multi_label": (multi_label, MULTI_LABEL_SCORES, ("Precision and recall", "Results by class")),
    "values": (values, VALUE_SCORES, ("Predicted against true", "Results by site", "distance of the predicted")),
    "risks": (risks, RISK_SCORES, ("Survival by predicted risk", "no event until", "C index")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_its_page(kind: str, tmp_path: Path, browser: Browser) -> None:
    make, scores, expected = KINDS[kind]
    predictions = make()
    folder = Run(tmp_path)
    predictions.write(folder.predictions("test"))
    summary = summarise(predictions, dict(scores), 40)
    write_json(folder.evaluation("test"), {"split": "test", **summary})
    write_json(folder.environment, environment())
    write_json(folder.memory, {"engine": "plain PyTorch"})
    tifffile.imwrite(tmp_path / "slide.tif", np.full((64, 64, 3), 200, np.uint8), tile=(64, 64), photometric="rgb")
    write_manifest(folder.splits, [SlideRecord(n, tmp_path / "slide.tif", "", "p", "test") for n in NAMES])
    folder.config.write_text("train: {epochs: 2}\n")
    page = write_report(folder)
    text = unescape(page.read_text(encoding="utf-8"))
    for words_ in expected:
        assert words_ in text
    document, logged = browser(page, "--dump-dom")
    assert logged == "" and f"{COUNT} of {COUNT} slides" in document


def test_errors_are_those_counted_by_hand() -> None:
    two = RiskPredictions(("x", "y"), ("x", "y"), np.array([1.0, 2.0]), np.array([True, False]), np.array([0.0, 1.0]))
    assert two.errors().tolist() == [1.0, 1.0]
    one = MultiLabelPredictions(("x",), ("x",), ("a", "b"), np.array([[1.0, np.nan]]), np.array([[0.25, 0.9]]))
    assert one.errors().tolist() == [0.75]
    assert one.words(0) == Words("a", "b", wrong=True)
