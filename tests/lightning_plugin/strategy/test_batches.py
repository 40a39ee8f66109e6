"""Any structure of a batch: large images become lazy where they are, all else moves as usual."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_plugin import LazyImage, SFTStrategy
from lightning_plugin.capture.lazy import LazyTensor
from lightning_plugin.strategy.batch import Arrangement
from tests.exactness import difference
from tests.lightning_plugin.strategy.modules import Each
from tests.lightning_plugin.strategy.training import trainer

IMAGE = torch.randn(2, 3, 24, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
LABEL = torch.tensor([0, 1])

Pair = namedtuple("Pair", "image label")


@dataclass
class Record:
    image: Tensor
    label: Tensor


class Own:
    """A batch class with a ``to`` of its own, as graph and detection libraries have them."""

    def __init__(self, image: Tensor, label: Tensor) -> None:
        self.image, self.label = image, label

    def to(self, *args: Any, **kwargs: Any) -> Own:
        return Own(self.image.to(*args, **kwargs), self.label.to(*args, **kwargs))


def image_of(batch: Any) -> Tensor:
    if isinstance(batch, dict):
        return batch["nested"][0]["image"]
    return batch.image if hasattr(batch, "image") else batch[0]


class Model(pl.LightningModule):
    """Returns what the step saw."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen = image_of(batch)
        features = self.net(self.seen)
        self.value = features.square().mean()
        return self.value

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)


BATCHES = {
    "tuple": (IMAGE, LABEL),
    "list": [IMAGE, LABEL],
    "dictionary": {"nested": [{"image": IMAGE}, "a name"], "label": LABEL},
    "named tuple": Pair(IMAGE, LABEL),
    "dataclass": Record(IMAGE, LABEL),
    "own class": Own(IMAGE, LABEL),
    "lazy": (LazyImage.from_tensor(IMAGE), LABEL),
}


def run(model: Any, batch: Any, strategy: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model = model()
    trainer(strategy, max_steps=1, **options).fit(model, Each(batch))
    return model


@pytest.mark.parametrize("name", BATCHES)
def test_any_structure(name: str) -> None:
    expected = run(Model, (IMAGE, LABEL), "auto")
    strategy = SFTStrategy(tiles=(3, 2))
    actual = run(Model, BATCHES[name], strategy)
    assert isinstance(actual.seen, LazyTensor)
    assert strategy.report is not None and strategy.report.tiles > 0
    assert difference(actual.value.detach(), expected.value.detach()) < 1e-9


def test_what_the_budget_has_room_for_is_moved_as_usual() -> None:
    model = run(Model, (IMAGE, LABEL), SFTStrategy(budget="1GiB"))
    assert type(model.seen) is Tensor


def test_a_step_that_was_left_whole_is_not_recorded_again() -> None:
    class Noting(Model):
        def __init__(self) -> None:
            super().__init__()
            self.lazy: list[bool] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.lazy.append(isinstance(batch[0], LazyTensor))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.training_step(batch, batch_idx)

    torch.manual_seed(0)
    model = Noting()
    strategy = SFTStrategy(budget="1GiB", tile_over=1)
    data = Each(*[(IMAGE, LABEL)] * 3)
    trainer(strategy, max_epochs=1).fit(model, data, data)
    assert model.lazy == [True, False, False, True, False, False], "training and validation are planned once each"


def test_an_image_larger_than_the_budget_is_never_copied() -> None:
    """The lazy image reads from the memory the user's tensor lies in."""
    model = run(Model, (IMAGE, LABEL), SFTStrategy(tiles=(3, 2)))
    assert model.seen.source.tensor.data_ptr() == IMAGE.data_ptr()


def test_hooks_of_the_user_are_called() -> None:
    class Hooks(Model):
        calls: tuple[str, ...] = ()

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.calls += ("before", type(batch[0]).__name__)
            return batch[0] * 2, batch[1]

        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            moved = super().transfer_batch_to_device(batch, device, dataloader_idx)
            self.calls += ("transfer", type(moved[0]).__name__)
            return moved

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.calls += ("after",)
            return batch[0].flip(-1) + 1, batch[1]

    expected = run(Hooks, (IMAGE, LABEL), "auto")
    actual = run(Hooks, (IMAGE, LABEL), SFTStrategy(tiles=(3, 2)))
    assert actual.calls == ("before", "Tensor", "transfer", "LazyImage", "after")
    assert difference(actual.value.detach(), expected.value.detach()) < 1e-9


def test_a_hook_that_moves_nothing_leaves_nothing_untiled() -> None:
    class Still(Model):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            return batch

    assert isinstance(run(Still, (IMAGE, LABEL), SFTStrategy(tiles=(3, 2))).seen, LazyTensor)


ARRANGEMENTS = [
    ((2, 3, 24, 20), torch.float32, Arrangement(1)),
    ((2, 64, 24, 20), torch.float32, Arrangement(1)),
    ((2, 24, 20, 3), torch.uint8, Arrangement(3)),
    ((1, 50, 3, 16, 16), torch.float32, Arrangement(2)),
    ((1, 1, 30, 40, 50), torch.float32, Arrangement(1)),
    ((2, 24, 20), torch.int64, Arrangement(None)),
    ((2, 4, 4000), torch.float32, Arrangement(1)),
    ((1, 4000, 512), torch.float32, None),
    ((2, 4000), torch.float32, None),
    ((0, 3, 24, 20), torch.float32, None),
]


@pytest.mark.parametrize(("shape", "dtype", "expected"), ARRANGEMENTS, ids=str)
def test_how_a_tensor_lies(shape: tuple[int, ...], dtype: torch.dtype, expected: Any) -> None:
    assert Arrangement.of(shape, dtype) == expected


class Elsewhere(Model):
    """Pictures with their channels last, or in a bag; a map of classes; a sequence."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        last, bag, classes, sequence, line = batch
        one = self.net(last.permute(0, 3, 1, 2).double() / 255)
        many = self.net(bag.flatten(0, 1)).mean((2, 3)).unflatten(0, bag.shape[:2]).amax(1)
        dense = nn.functional.cross_entropy(one, classes)
        self.kinds = [isinstance(t, LazyTensor) for t in batch]
        self.value = dense + many.sum() + sequence.mean() + line.square().sum()
        return self.value


def test_images_with_channels_elsewhere() -> None:
    generator = torch.Generator().manual_seed(3)
    batch = (
        torch.randint(256, (2, 24, 20, 3), generator=generator, dtype=torch.uint8),
        torch.randn(1, 5, 3, 12, 12, generator=generator, dtype=torch.float64),
        torch.randint(4, (2, 24, 20), generator=generator),
        torch.randn(1, 40, 8, generator=generator, dtype=torch.float64),
        torch.randn(1, 2, 99, generator=generator, dtype=torch.float64),
    )
    expected = run(Elsewhere, batch, "auto")
    actual = run(Elsewhere, batch, SFTStrategy(tiles=(3, 2)))
    assert actual.kinds == [True, True, True, False, True]
    assert difference(actual.value.detach(), expected.value.detach()) < 1e-9
