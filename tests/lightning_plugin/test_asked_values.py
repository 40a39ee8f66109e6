"""A value that is asked for before backward, by a check, a branch or a metric, runs what was recorded so far; what that
run hands to the next one changes no number of the step."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_plugin import LazyImage, TiledModule, materialize
from lightning_plugin.strategy.tiling import SFTStrategy
from tests.exactness import TOLERANCE, difference
from tests.lightning_plugin.step_parts import ASKS
from tests.sampling import sampled

OPTIONS = {
    "tiles": {"tiles": (2, 3)},
    "some parts kept": {"budget": "160KiB"},
    "all kept": {"budget": "10MiB"},
}
NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(4),
    "batch without weights": lambda: nn.BatchNorm2d(4, affine=False),
    "batch without statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "instance": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "group": lambda: nn.GroupNorm(2, 4),
}


class Asking(nn.Module):
    """Convolutions and a norm, in whose middle a value is asked for: a forward that checks what it computes."""

    def __init__(self, norm: str, ask: str) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1, bias=False), NORMS[norm]()
        self.last, self.ask = nn.Conv2d(4, 5, 3, 2, 1), ASKS[ask]
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        other = self.ask(y, self.seen)
        return self.last(F.softplus(y if other is None else other))  # type: ignore[no-any-return]


def network(norm: str = "batch", ask: str = "assert isfinite") -> Asking:
    torch.manual_seed(0)
    return Asking(norm, ask).double()


def images(seed: int = 1) -> Tensor:
    return torch.randn(2, 3, 24, 28, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss_of(y: Tensor) -> Tensor:
    return (y * torch.linspace(-1, 2, y.shape[-1], dtype=y.dtype)).square().mean()


def assert_same(tiled: nn.Module, plain: nn.Module) -> None:
    """Compare gradients, None where plain PyTorch has None, and buffers."""
    floor = 1e-3 * max((float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None), default=0.0)
    for (name, p), q in zip(plain.named_parameters(), tiled.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and q.grad is not None:
            assert difference(q.grad, p.grad, floor) < TOLERANCE, name
    for (name, b), c in zip(plain.named_buffers(), tiled.buffers(), strict=True):
        assert difference(c, b) < TOLERANCE, name


@pytest.mark.parametrize(
    ("ask", "norm", "options"),
    sampled(["assert isfinite", "if y.mean() > 0.123", "std without grad", "materialize"], NORMS, OPTIONS, every=5),
)
def test_values_asked_for_in_forward(ask: str, norm: str, options: str) -> None:
    plain = network(norm, ask)
    tiled = copy.deepcopy(plain)
    run = TiledModule(tiled, **OPTIONS[options])
    for seed in (1, 2):  # the second step finds what the first left behind
        x, twin = images(seed).requires_grad_(), images(seed).requires_grad_()
        loss_of(plain(x)).backward()
        loss_of(run(twin)).backward()
        assert x.grad is not None and twin.grad is not None
        assert difference(twin.grad, x.grad) < TOLERANCE
    assert_same(tiled, plain)
    assert tiled.seen == pytest.approx(plain.seen, rel=1e-12)


def read_one_first(module: nn.Module, x: Tensor) -> None:
    y = module(x)
    first, second = y[:, 0].mean(), loss_of(y)
    float(first)
    (first + second).backward()


def two_backwards(module: nn.Module, x: Tensor) -> None:
    y = module(x)
    y.square().mean().backward(retain_graph=True)
    loss_of(y).backward()


def first_without_grad(module: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        float(module(x).mean())
    loss_of(module(x)).backward()


def statistics_read(module: nn.Module, x: Tensor) -> None:
    y = module(x)
    norm = next(m for m in module.modules() if isinstance(m, nn.BatchNorm2d))
    assert norm.running_mean is not None and bool(norm.running_mean.any())
    loss_of(y).backward()


def freed_between(module: nn.Module, x: Tensor) -> None:
    """A discriminator that is frozen for the generator's term, whose value is logged at once."""
    module.requires_grad_(False)
    y = module(x.requires_grad_())
    float(y.mean())
    module.requires_grad_(True)
    loss_of(y).backward()


class Written(nn.Module):
    """Writes to a small result whose value was asked for, also through a view, after a map was computed from it."""

    def __init__(self, grad: bool, by_view: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.grad, self.by_view = grad, by_view

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.set_grad_enabled(self.grad):
            level = y.mean((2, 3))
        view = level[:, :, None, None]
        y = self.second(y) + view
        asked = (view if self.by_view else level).detach().sum()
        del view
        float(asked)
        level.mul_(3)
        return y.mean((2, 3)) + level


@pytest.mark.parametrize("by_view", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("options", list(OPTIONS))
def test_a_result_written_to_after_its_value_was_asked_for(options: str, grad: bool, by_view: bool) -> None:
    torch.manual_seed(0)
    plain = Written(grad, by_view).double()
    tiled = copy.deepcopy(plain)
    expected, found = plain(images()), TiledModule(tiled, **OPTIONS[options])(images())
    assert difference(found, expected) < TOLERANCE
    expected.square().sum().backward()
    found.square().sum().backward()
    assert_same(tiled, plain)


@pytest.mark.parametrize(
    ("use", "options", "lazy"),
    sampled(
        [read_one_first, two_backwards, first_without_grad, statistics_read, freed_between], OPTIONS, [False, True],
        every=3,
    ),
)  # fmt: skip
def test_runs_hand_nothing_wrong_to_each_other(use: Callable[..., None], options: str, lazy: bool) -> None:
    plain = network()
    tiled = copy.deepcopy(plain)
    use(plain, images())
    x = images().requires_grad_(use is freed_between)
    use(TiledModule(tiled, **OPTIONS[options]), LazyImage.from_tensor(x) if lazy else x)
    assert_same(tiled, plain)


class Checked(pl.LightningModule):
    """A LightningModule that checks its activations, as people do who look for a NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: Tensor) -> Tensor:
        return loss_of(materialize(self.net(batch)))

    def train_dataloader(self) -> DataLoader:
        return DataLoader([images(seed)[0] for seed in range(6)], batch_size=2)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_check_in_a_lightning_module(tmp_path) -> None:
    trained = []
    for strategy in ("auto", SFTStrategy(budget="1GiB")):
        module = Checked()
        pl.Trainer(
            strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        ).fit(module)  # fmt: skip
        trained.append(module)
    for (name, p), q in zip(trained[0].named_parameters(), trained[1].parameters(), strict=True):
        assert difference(q.detach(), p.detach()) < TOLERANCE, name
