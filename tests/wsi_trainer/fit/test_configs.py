"""Every config in `configs/` is one that `wsi-train fit` takes, and its network runs."""

from pathlib import Path

import pytest
import torch

from wsi_trainer.fit.command import instantiate, make_parser, parse

CONFIGS = sorted((Path(__file__).resolve().parents[3] / "configs").glob("*.yaml"))
ADDITIONS = {"card-11gib.yaml", "cpu-only.yaml"}
"""Configs that change the machine only, to be put after one with a model."""


def words(config: Path) -> list[str]:
    base = config.with_name("synthetic.yaml") if config.name in ADDITIONS else None
    return [f"--config={path}" for path in (base, config) if path]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_is_accepted_and_its_network_classifies_a_small_slide(config: Path) -> None:
    parser = make_parser("fit", "")
    options = parse(parser, words(config))
    model, _, train = instantiate(parser, options)
    assert train.budget is not None and train.budget == options.train.budget
    image = torch.zeros(1, 3, 128, 160, dtype=torch.uint8)
    with torch.no_grad():
        probabilities = model.eval().task.probabilities(model(image))
    assert probabilities.shape == (1, len(model.task.classes))
    torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(1))


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
