"""Every config in `wsi_trainer/configs/` is one that `wsi-train fit` takes, and its network runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from wsi_trainer.fit.config import check_settings, instantiate, make_parser, parse
from wsi_trainer.fit.plan import plan_shape
from wsi_trainer.models import SlideBatch

CONFIGS = sorted((Path(__file__).resolve().parents[3] / "wsi_trainer" / "configs").glob("*.yaml"))
ADDITIONS = {"card-11gib.yaml", "cpu-only.yaml", "multi-gpu.yaml"}
"""Configs that change the machine only, to be put after one with a model."""


def words(config: Path) -> list[str]:
    base = config.with_name("demo.yaml") if config.name in ADDITIONS else None
    return [f"--config={path}" for path in (base, config) if path]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_is_accepted_and_its_network_classifies_a_small_slide(config: Path) -> None:
    parser = make_parser("fit", "")
    options = parse(parser, words(config))
    model, data, train = instantiate(parser, options)
    assert train.budget is not None and train.budget == options.train.budget
    images = [
        torch.zeros(1, 3, 128 // 4**level, 160 // 4**level, dtype=torch.uint8) for level in range(model.magnifications)
    ]
    if data.patches is not None:
        images = [torch.zeros(2, 3, data.patches.size, data.patches.size, dtype=torch.uint8)]
    with torch.no_grad():
        batch = SlideBatch(image=images[0], context=images[1:], label=torch.tensor([-1]), slide="a")
        _, predicted = model.eval().predict_step(batch, 0)
    assert predicted is not None
    assert predicted.shape == (1, len(model.task.names)) and predicted.isfinite().all()
    if model.task.classes:
        classes = predicted[:, : len(model.task.classes)]
        torch.testing.assert_close(classes.sum(dim=1), torch.ones(1))


def sizes() -> Iterator[Any]:
    """A slide for each config; to search for plans of a U-Net takes long, so in a sample its slide is smaller."""
    for path in CONFIGS:
        long = path.stem.startswith("segmentation")
        if long:
            yield pytest.param(path, 768, 576, id=f"{path.stem}-smaller")
        yield pytest.param(path, 3072, 2304, id=path.stem, marks=[pytest.mark.full] if long else [])


@pytest.mark.parametrize(("config", "height", "width"), list(sizes()))
def test_plans_a_step_without_data(config: Path, height: int, width: int) -> None:
    parser = make_parser("fit", "")
    model, data, train = instantiate(parser, parse(parser, words(config)))
    check_settings(model, data, train)
    assert train.budget is not None
    factors = [factor / data.downsample for factor in data.extra_downsamples]
    shape = (1, 3, height, width) if data.patches is None else (500, 3, data.patches.size, data.patches.size)
    plan = plan_shape(model, shape, train.budget, "cuda", factors)
    assert plan.budget is not None and 0 < plan.peak_bytes <= plan.budget


def test_there_is_one_for_everything_a_user_would_start_from() -> None:
    names = {
        "demo",
        "tumour-detection",
        "subtype",
        "grading",
        "survival",
        "patches",
        "multi-gpu",
        "card-11gib",
        "cpu-only",
    }
    assert names <= {path.stem for path in CONFIGS}


def test_an_addition_changes_only_the_machine() -> None:
    config = next(path for path in CONFIGS if path.name == "cpu-only.yaml")
    parser = make_parser("fit", "")
    changed, base = parse(parser, words(config)), parse(parser, words(config)[:1])
    assert changed.model == base.model and changed.data == base.data
    assert (changed.train.budget, base.train.budget) == ("2GiB", "64MiB")


def test_a_dumped_config_reads_back_the_same() -> None:
    parser = make_parser("fit", "")
    options = parse(parser, words(CONFIGS[0]))
    again = parser.parse_string(parser.dump(options))
    assert parser.dump(again) == parser.dump(options)
    assert again.model == options.model and again.model.backbone.init_args
