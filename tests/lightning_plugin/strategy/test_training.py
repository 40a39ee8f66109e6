"""An unchanged LightningModule trains under this strategy as under Lightning's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils.parametrizations import weight_norm

from lightning_plugin import BudgetError, LazyImage, SFTStrategy
from lightning_plugin.planner.analysis.optimizers import state_bytes
from tests.exactness import difference
from tests.lightning_plugin.strategy.modules import Pictures, Slides, loader
from tests.lightning_plugin.strategy.training import assert_same, fit, fit_both, trainer


def test_ten_steps_are_those_of_the_default_strategy() -> None:
    plain, first, tiled, second = fit_both(Slides, loader(), max_epochs=2, max_steps=10)
    assert len(plain.losses) == len(tiled.losses) == 10
    assert_same(tiled, plain)
    assert first.logged_metrics.keys() == second.logged_metrics.keys()
    for name, value in first.logged_metrics.items():
        assert difference(torch.as_tensor(second.logged_metrics[name]), torch.as_tensor(value)) < 1e-9, name


def test_a_budget_gives_the_same_training() -> None:
    with pytest.raises(BudgetError) as refused:
        fit(Slides(), loader(), SFTStrategy(budget=1, tile_over=1), max_steps=1)
    assert "Parameters, gradients and the optimizer's state alone take 78.2 KiB" in str(refused.value)
    budget = int(1.05 * refused.value.smallest)
    plain, _, tiled, second = fit_both(Slides, loader(), tiles={"budget": budget, "tile_over": 1}, max_steps=2)
    assert_same(tiled, plain)
    assert any(s.forward.tiles > 1 for s in second.strategy.plan.segments)


def test_lazy_images_of_a_dataset_can_be_given_again_in_every_epoch() -> None:
    class Lazy(Pictures):
        def __init__(self) -> None:
            super().__init__(4)
            self.lazy = [LazyImage.from_tensor(image[None]) for image in self.images]

        def __getitem__(self, index: int) -> dict:
            return {"image": self.lazy[index], "label": self.labels[index : index + 1]}

    plain, tiled = Slides(), Slides()
    tiled.load_state_dict(plain.state_dict())
    fit(plain, loader(4, 1), max_epochs=3)
    fit(tiled, torch.utils.data.DataLoader(Lazy(), batch_size=None), SFTStrategy(tiles=(2, 2)), max_epochs=3)
    assert_same(tiled, plain)


def test_what_was_planned_and_used_is_there_to_read() -> None:
    """The optimizer's state is counted before it exists."""
    strategy = SFTStrategy(budget="1MiB", tile_over=1)
    stem = weight_norm((module := Slides()).net.stem)
    fit(module, loader(2), strategy, max_steps=1)
    state = sum(p.numel() * p.element_size() for p in module.parameters())
    assert strategy.plan is not None and strategy.plan.budget == 2**20
    assert strategy.plan.forecast.fixed_bytes >= 3 * state + 2 * stem.weight.nbytes
    assert 3 * state < strategy.peak_bytes <= strategy.plan.peak_bytes <= 2**20
    assert strategy.engine.planner.reserved == state, "a momentum for each parameter"


@pytest.mark.parametrize(
    ("kind", "options", "per_parameter"),
    [
        ("SGD", {}, 0),
        ("SGD", {"momentum": 0.9}, 1),
        ("AdamW", {}, 2),
        ("AdamW", {"amsgrad": True}, 3),
        ("LBFGS", {}, 2),
    ],
)
def test_what_an_optimizer_will_hold(kind: str, options: dict, per_parameter: int) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(5, 3)), torch.nn.Parameter(torch.zeros(7))]
    optimizer = getattr(torch.optim, kind)(parameters, lr=0.1, **options)
    assert state_bytes(optimizer) == per_parameter * 4 * 22
    assert not optimizer.state and all(p.grad is None for p in parameters), "nothing is done to it"


@pytest.mark.parametrize("base", [torch.optim.Adam, torch.optim.Optimizer])
def test_a_users_optimizer_is_not_called_to_learn_what_it_holds(base: type) -> None:
    calls = []

    class Counting(base):  # type: ignore[misc]
        def step(self, closure=None):  # type: ignore[no-untyped-def]
            calls.append(self)

    parameters = [torch.nn.Parameter(torch.zeros(5, 3))]
    optimizer = Counting(parameters, **({} if base is torch.optim.Adam else {"defaults": {}}))
    assert state_bytes(optimizer) == 2 * 4 * 15, "as Adam, whose state it has or is taken to have"
    assert not calls
    optimizer.state[parameters[0]] = {"history": torch.zeros(9, 15), "step": torch.tensor(1.0)}
    assert state_bytes(optimizer) == 9 * 4 * 15, "what it really holds counts"


def test_the_name_alone_is_enough() -> None:
    run = trainer("sft")
    assert isinstance(run.strategy, SFTStrategy)
