"""Losses, predictions and results that a user keeps of a step are ordinary tensors and hold no image."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_plugin import LazyImage, SFTStrategy, TiledModule
from tests.exactness import TOLERANCE, difference
from tests.sampling import sampled

STEPS = 3
WAYS: dict[str, dict[str, Any]] = {"tiles": {"tiles": 2}, "all kept": {"budget": "64MiB"}, "some": {"budget": "300KiB"}}

Keep = Callable[[list[Any], Tensor, Tensor], None]


def keep_and_halve(kept: list[Any], loss: Tensor, logits: Tensor) -> None:
    kept.append(loss.detach())
    loss /= 2


KEEPS: dict[str, Keep] = {
    "detached": lambda kept, loss, logits: kept.append(loss.detach()),
    "loss": lambda kept, loss, logits: kept.append(loss),
    "logits": lambda kept, loss, logits: kept.append(logits.detach()),
    "predictions": lambda kept, loss, logits: kept.append(logits.argmax(1)),
    "in a dict": lambda kept, loss, logits: kept.append({"loss": loss.detach().clone(), "score": logits.softmax(1)[0]}),
    "changed since": keep_and_halve,
}


class Pooled(nn.Module):
    """A convolutional network: its logits are reduced over space."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)
        )
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))  # type: ignore[no-any-return]


class ClassToken(nn.Module):
    """A transformer: the logits of several images are a map of one row for each."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 8, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.token.expand(len(x), -1, -1), self.patches(x).flatten(2).mT], 1)
        return self.head(self.layer(tokens)[:, 0])  # type: ignore[no-any-return]


class Classifier(pl.LightningModule):
    def __init__(self, net: nn.Module, keep: Keep) -> None:
        super().__init__()
        self.net, self.keep = net, keep
        self.kept: list[Any] = []
        self.images: list[weakref.ref[Tensor]] = []
        self.alive = -1

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        source = x.source.tensor if isinstance(x, LazyImage) else x
        self.images.append(weakref.ref(source))
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        self.keep(self.kept, loss, logits)
        self.log_dict({"loss": loss, "mean": logits.mean()}, on_step=True, on_epoch=True)
        return loss

    validation_step = training_step

    def on_train_epoch_end(self) -> None:
        gc.collect()
        self.alive = sum(ref() is not None for ref in self.images)

    on_validation_epoch_end = on_train_epoch_end

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def kept_by(strategy: Any, net: type[nn.Module], keep: Keep, images: int, stage: str) -> tuple[Classifier, list[Any]]:
    """Run an epoch; return the module, and the leaves of what it has kept."""
    torch.manual_seed(0)
    data = [(torch.randn(3, 32, 32), 1) for _ in range(STEPS * images)]
    module = Classifier(net(), keep)
    trainer = pl.Trainer(
        accelerator="cpu", strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0 if stage == "fit" else None,
    )  # fmt: skip
    with torch.random.fork_rng():
        getattr(trainer, stage)(module, DataLoader(data, batch_size=images))
    return module, torch.utils._pytree.tree_leaves(module.kept)


@pytest.mark.slow
@pytest.mark.parametrize(("keep", "net", "stage"), sampled(KEEPS, [Pooled, ClassToken], ["fit", "validate"], every=3))
def test_what_a_lightning_module_keeps_is_plain(keep: str, net: type[nn.Module], stage: str) -> None:
    images = 1 if net is Pooled else 2
    plain, expected = kept_by("auto", net, KEEPS[keep], images, stage)
    way = WAYS["some" if keep == "detached" and net is Pooled else "tiles"]
    tiled, found = kept_by(SFTStrategy(tile_over=1, **way), net, KEEPS[keep], images, stage)
    assert [type(t) for t in found] == [Tensor] * len(found)
    torch.testing.assert_close(found, expected)
    assert tiled.alive == plain.alive < STEPS  # the loop of a validation holds its last batch


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("image", [lambda x: x, LazyImage.from_tensor])
def test_a_loss_that_was_pulled_back_holds_no_image(how: str, image: Callable[[Tensor], Tensor]) -> None:
    net = Pooled()
    tiled, kept, images = TiledModule(net, **WAYS[how]), [], []
    for _ in range(STEPS):
        x = torch.randn(1, 3, 32, 32)
        loss = F.cross_entropy(tiled(image(x)), torch.tensor([1]))
        loss.backward()
        images.append(weakref.ref(x))
        kept.append(loss)
        del x, loss
    gc.collect()
    assert [type(t) for t in kept] == [Tensor] * STEPS
    assert not any(ref() is not None for ref in images)


class Observed(Pooled):
    """A module that keeps parts of its forward, as those that log do."""

    def forward(self, x: Tensor) -> Tensor:
        self.map = self.body(x)
        self.features = self.map.mean((2, 3))
        self.first = self.features[:, 0]
        self.aside = self.features.detach()
        assert not self.aside.requires_grad and not torch.zeros_like(self.features).requires_grad
        self.features.mul_(2)
        return self.head(self.features)  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", WAYS)
def test_kept_vectors_have_their_place_in_autograds_graph(how: str) -> None:
    def step(net: Observed, run: nn.Module) -> list[Tensor]:
        out = run(torch.linspace(-1, 1, 3 * 32 * 32, dtype=torch.float64).sin().view(1, 3, 32, 32))
        net.features.retain_grad()
        loss = (out.square().sum() + net.first.sum()) / 2
        inner = torch.autograd.grad(loss, net.features, retain_graph=True)
        loss /= 3
        loss.backward()
        assert net.features.grad is not None
        return [
            loss,
            *inner,
            net.features,
            net.features.grad,
            net.first,
            net.aside,
            *(p.grad for p in net.parameters()),
        ]

    net = Observed().double()
    expected = step(net, net)
    net.zero_grad()
    found = step(net, TiledModule(net, **WAYS[how]))
    assert {type(t) for t in (net.features, net.first, net.aside)} == {Tensor}
    assert not net.aside.requires_grad
    for a, b in zip(found, expected, strict=True):
        assert difference(a, b) < TOLERANCE


def test_a_result_that_the_module_keeps_is_the_result() -> None:
    class Kept(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            self.out = {"map": x * 2, "loss": x.sum()}
            return self.out

    net, x = Kept(), torch.randn(1, 3, 8, 8)
    out = TiledModule(net, tiles=2)(x)
    assert out["map"] is net.out["map"] and out["loss"] is net.out["loss"]
    assert {type(t) for t in out.values()} == {Tensor}
    torch.testing.assert_close(out["map"], x * 2)


def test_a_tensor_that_goes_through_stays_the_users() -> None:
    """An identity returns the user's tensor; what becomes of its recorded result must not touch it."""
    x = torch.randn(1, 3, 8, 8, requires_grad=True) * 1
    x.retain_grad()
    out = TiledModule(nn.Identity(), tiles=2)(x)
    out.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.ones_like(x))
    assert type(x) is Tensor and x.grad_fn is not None and x.grad_fn.name() == "MulBackward0"
