"""Each fact of a slide, a result and a model has one owner: no other file of the application computes it.

A pattern is how the fact is computed. Beside it stand the files that may have it: the owner, and those that mean
something else by the same words.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CODE = Path(__file__).resolve().parents[2] / "wsi_trainer"
FOLDERS = {  # names of folds, of files of results, and of pictures beside a store
    "fit/cross_validation.py", "fit/folder.py", "fit/result.py", "fit/scoring.py", "fit/study.py", "metrics/targets.py",
    "preprocess/tissue.py", "report/pictures.py", "store/convert.py",
}  # fmt: skip
MRXS = {"preprocess/inputs.py", "slide/formats/openslide.py", "slide/identity.py"}
"""A slide of MRXS is a file and the folder of its name."""
NOBODY: set[str] = set()

SLIDE = {
    "hashes of slides": (r"\b_hash\(|full_hash\(|hash_of_1_0\(", {
        "slide/identity.py", "store/convert.py", "data/features.py",
    }),
    "the hash in a store": (r'\["source"\]', {"slide/identity.py", "store/convert.py"}),
    "files that are hashed": (r"file_digest\(", {"io/files.py", "slide/identity.py"}),
    "which slide is the same": (r"KnownSlides\(\)|is_comparable\(", {
        "slide/identity.py", "data/cohort.py", "preprocess/stores.py",
    }),
    "names without endings": (r"\.stem\b|with_suffix|removesuffix\(Path|splitext", FOLDERS | MRXS),
    "endings that are taken off": (r"_ENDING\b", {"slide/names.py"}),
    "spellings": (r"unicodedata|normpath|realpath|lstrip\(\"0", {
        "slide/names.py", "preprocess/stores.py",
    }),
    "files about a slide": (r"\{slide_name\(|slide_name\([^)]*\)\}", {"slide/mask.py"}),
}  # fmt: skip
PIXEL = {
    "what the file says": (r"\binfo\.mpp\b", {"slide/slide.py", "slide/geometry.py"}),
    "what is taken": (r"\bresolve\((?!\))", {"slide/slide.py", "slide/geometry.py"}),
    "who gives it": (r"Slide\.open\([^)]*mpp=(?!0)", {"data/manifest.py", "slide/mask.py", "view/scene.py"}),
    "how far slides are shrunk": (r"factors_to\(|\.factors(_from)?\(", {
        "slide/geometry.py", "slide/slide.py", "slide/views.py", "store/convert.py", "data/patches.py",
        "data/dataset.py",
    }),
    "former ways": (r"shrink_factor|\.shrink\b|(slide|view|bag|image|source)\.mpp\b(?!-)|patches\.resolution", NOBODY),
}  # fmt: skip
RESULT = {
    "files of results": (r'"(heatmaps|segments|evaluation|predictions)"|(heatmaps|segments|scores)\.json"', {
        "fit/result.py",
    }),
    "runs that belong together": (r'"(cross_validation|comparison)\.json"', {"fit/study.py"}),
    "which checkpoint": (r'"checkpoints"|\.ckpt"', {"fit/folder.py"}),
    "slides that were trained on": (r"\bTrained\(", {"fit/folder.py"}),
}  # fmt: skip
DECISION = {  # pixels are of their most probable class, tile by tile
    "a probability becomes a class": (r"argmax\((axis|dim)=", {
        "metrics/decision.py", "models/segmentation.py", "segment/predict.py",
    }),
    "a probability is compared": (r"probabilit\w*\)?(\[.*\])? *>=? *[\d.]", NOBODY),
    "the rule": (r"def decide\(", {"metrics/decision.py"}),
}  # fmt: skip
TARGET = {
    "a cell becomes a target": (r"\.target\(", {"models/tasks.py", "models/targets.py"}),
    "a cell becomes a number": (r"\b(number|yes_or_no)\(cells", {"models/tasks.py"}),
    "the kind of predictions": (r"isinstance\([^)]*Predictions\b|type\((first|second|\w*predictions)\) is", NOBODY),
    "former kinds": (r"JointPredictions|joint_scores|\.of_slide\b|\.claims\(columns", NOBODY),
    "the kind of a table of 1.0": (r"_declaration_of_1_0\(", {"metrics/targets.py"}),
    "the second target of 1.0": (r"auxiliary", {
        "fit/config.py", "models/batch.py", "models/segmentation.py", "models/weights.py",
    }),
    "the only target of 1.0": (r'\["label"\]', NOBODY),
    "heads that are told apart": (r"isinstance\([^)]*(head|Pooling)\b", NOBODY),
}  # fmt: skip
MODEL = {
    "Trainers": (r"Trainer\(|make_trainer\(", {"fit/trainer.py", "fit/fit.py"}),
    "loops of Trainers that predict": (r"trainer\.(predict|test|validate)\(|predict_step|test_step", NOBODY),
    "files of weights": (r"read_checkpoint\(|torch\.load\(", {"models/weights.py", "fit/trainer.py"}),
    "weights in a model": (r"\.load_state_dict\(", {"models/weights.py", "data/datamodule.py"}),
    "weights of runs": (r"load_weights\(", {
        "models/weights.py", "fit/config.py", "fit/run.py", "fit/fit.py", "models/slide_model.py", "embed.py",
    }),
    "engines": (r"TiledModule\(", {"fit/predictor.py", "explain/attribution.py"}),
    "batches that are predicted": (r"\.predicted\(", {"fit/predictor.py"}),
    "the hub": (r"huggingface_hub\b", {"models/hub.py", "models/slide_model.py", "fit/predictor.py"}),
}  # fmt: skip
FACTS = {f"{fact}: {name}": rule for fact, rules in {
    "slide": SLIDE, "size of a pixel": PIXEL, "result": RESULT, "decision": DECISION, "target": TARGET, "model": MODEL,
}.items() for name, rule in rules.items()}  # fmt: skip


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    """The text of each file of the application."""
    paths = (path for suffix in ("py", "j2") for path in CODE.rglob(f"*.{suffix}"))
    return {path.relative_to(CODE).as_posix(): path.read_text("utf-8") for path in paths}


@pytest.mark.parametrize("fact", FACTS)
def test_a_fact_has_one_owner(fact: str, files: dict[str, str]) -> None:
    pattern, owners = FACTS[fact]
    assert {file for file, text in files.items() if re.search(pattern, text)} == owners
