"""Lightning's precision plugins under tiles."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pytorch_lightning.plugins import MixedPrecision
from torch import Tensor, nn

from tests.lightning_plugin.strategy.modules import Slides, loader
from tests.lightning_plugin.strategy.training import assert_same, differences, fit, fit_both


class Typed(Slides):
    """Notes the type in which its stem computes."""

    stem: torch.dtype | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.stem = self.net.stem(batch["image"]).dtype
        return super().training_step(batch, batch_idx)


#: precision, and the type in which the stem then computes.
PRECISIONS = [
    ("32-true", torch.float32),
    ("64-true", torch.float64),
    ("bf16-true", torch.bfloat16),
    ("bf16-mixed", torch.bfloat16),
]


@pytest.mark.parametrize(("precision", "computed"), PRECISIONS)
def test_precision(precision: str, computed: torch.dtype) -> None:
    """Tiles round in another order than whole maps; they must not round more."""
    data = loader(dtype=torch.float32)
    torch.manual_seed(0)
    truth = Typed()
    start = copy.deepcopy(truth.state_dict())
    plain, _, tiled, _ = fit_both(Typed, data, precision=precision, max_steps=2)
    assert tiled.stem == plain.stem == computed
    truth.load_state_dict(start)
    fit(truth, data, precision="64-true", max_steps=2)
    error, allowed = (max(differences(module, truth).values()) for module in (tiled, plain))
    assert error <= max(2 * allowed, 1e-9)


def scaled(scale: float) -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    return {"precision": None, "plugins": MixedPrecision("16-mixed", "cpu", scaler)}


def test_float16_with_a_scaled_loss() -> None:
    modules, scales = [], []
    for strategy in ("auto", None):
        torch.manual_seed(0)
        module = Typed()
        run = fit(module, loader(dtype=torch.float32), **chosen(strategy), max_steps=3, **scaled(1024.0))
        assert module.stem == torch.float16
        modules.append(module)
        scales.append(run.precision_plugin.scaler.get_scale())
    assert scales[0] == scales[1] == 2048.0, "the scaler grew after two good steps"
    assert_same(modules[1], modules[0], 0.05)


def test_an_overflow_skips_the_step() -> None:
    class Overflowing(Typed):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * 1e30

    module = Overflowing()
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    run = fit(module, loader(dtype=torch.float32), **chosen(None), max_steps=1, **scaled(2.0**40))
    assert run.precision_plugin.scaler.get_scale() == 2.0**39
    assert all(torch.equal(p, before[n]) for n, p in module.named_parameters())


def chosen(strategy: Any) -> dict[str, Any]:
    from lightning_plugin import SFTStrategy

    return {"strategy": strategy or SFTStrategy(tiles=(2, 2))}


def test_clipping_sees_unscaled_gradients() -> None:
    modules = []
    for strategy in ("auto", None):
        torch.manual_seed(0)
        module = Typed()
        fit(
            module,
            loader(dtype=torch.float32),
            **chosen(strategy),
            max_steps=2,
            gradient_clip_val=0.05,
            **scaled(1024.0),
        )
        modules.append(module)
        norm = nn.utils.get_total_norm([p.grad for p in module.parameters()]).item()
        assert norm == pytest.approx(0.05, rel=1e-3)
    assert_same(modules[1], modules[0], 0.05)
