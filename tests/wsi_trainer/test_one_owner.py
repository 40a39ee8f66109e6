"""Labels are parsed, predictions told apart and probabilities decided on in one place each: no other file does it."""

from __future__ import annotations

import pytest

from tests.wsi_trainer.owners import files_with


@pytest.mark.parametrize(
    ("pattern", "owners"),
    [
        # a probability becomes a class; pixels are of their most probable class, tile by tile
        (r"argmax\((axis|dim)=", {"metrics/decision.py", "models/segmentation.py", "segment/predict.py"}),
        (r"probabilit\w*\)?(\[.*\])? *>=? *[\d.]", set[str]()),
        (r"def decide\(", {"metrics/decision.py"}),
        # a cell becomes a target
        (r"\.target\(", {"models/tasks.py", "models/targets.py"}),
        (r"\b(number|yes_or_no)\(cells", {"models/tasks.py"}),
        # the kind of predictions
        (r"isinstance\([^)]*Predictions\b|type\((first|second|\w*predictions)\) is", set[str]()),
        (r"JointPredictions|joint_scores|\.of_slide\b|\.claims\(columns", set[str]()),
        (r"_declaration_of_1_0\(", {"metrics/targets.py"}),
        # what 1.0 called a second target
        (r"auxiliary", {"fit/config.py", "models/segmentation.py", "models/slide_model.py", "models/weights.py"}),
        (r'\["label"\]', set[str]()),
    ],
)
def test_one_place(pattern: str, owners: set[str]) -> None:
    assert files_with(pattern, ".py", ".j2") == owners
