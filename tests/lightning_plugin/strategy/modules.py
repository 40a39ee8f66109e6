"""LightningModules as people write them: nothing in them knows of tiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytorch_lightning as pl
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

SIZE = (37, 45)


class Block(nn.Module):
    """A residual block with a projection."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.skip = nn.Conv2d(before, after, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.skip(x))


class Backbone(nn.Module):
    """Hand-written, with its own pooling: attention over positions beside the largest value."""

    def __init__(self, width: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 5, 2, 2)
        self.blocks = nn.Sequential(Block(width, width, 1), Block(width, 2 * width, 2))
        self.attention = nn.Conv2d(2 * width, 1, 1)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(4 * width, 3)

    def forward(self, x: Tensor) -> Tensor:
        features = self.blocks(self.stem(x)).flatten(2)
        weight = torch.softmax(self.attention(features.unsqueeze(-1)).flatten(2), dim=-1)
        pooled = torch.cat([(features * weight).sum(-1), features.amax(-1)], dim=1)
        return self.head(self.dropout(pooled))


class Slides(pl.LightningModule):
    """Metrics and logging in the step, several parameter groups, a scheduler, notes of every loss."""

    def __init__(self, dropout: float = 0.0, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = Backbone(dropout=dropout)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=3)
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(batch["image"])
        loss = nn.functional.cross_entropy(logits, batch["label"])
        self.accuracy(logits, batch["label"])
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train_accuracy", self.accuracy, on_epoch=True)
        self.log("confidence", logits.softmax(1).amax(1).mean())
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch["image"]), batch["label"]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch["image"]).softmax(1)

    def configure_optimizers(self) -> Any:
        head = list(self.net.head.parameters())
        names = {id(p) for p in head}
        body = [p for p in self.net.parameters() if id(p) not in names]
        optimizer = torch.optim.SGD([{"params": body}, {"params": head, "lr": 0.1}], lr=self.hparams.lr, momentum=0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
                "interval": "step",
            },
        }


class Noisy(Slides):
    """With masks that are drawn by position and on vectors, and a max pooling."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.net.stem = nn.Sequential(nn.Conv2d(3, 6, 5, 2, 2), nn.Dropout(0.2), nn.MaxPool2d(3, 2, 1))


class Pictures(Dataset):
    """Dense random images with labels, the same in every process."""

    def __init__(self, count: int = 10, size: tuple[int, int] = SIZE, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(7)
        self.images = torch.randn(count, 3, *size, generator=generator, dtype=torch.float64).to(dtype)
        self.labels = torch.randint(3, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self.images[index], "label": self.labels[index]}


def loader(count: int = 10, batch_size: int = 2, **options: Any) -> DataLoader:
    dtype = options.pop("dtype", torch.float64)
    return DataLoader(Pictures(count, dtype=dtype), batch_size=batch_size, **options)


class Each:
    """A loader that gives these batches as they are."""

    def __init__(self, *batches: Any) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Frozen(Slides):
    """BatchNorms in eval mode, as in fine-tuning: nothing of one image reaches another."""

    def on_train_start(self) -> None:
        self.freeze_statistics()

    def on_train_epoch_start(self) -> None:
        self.freeze_statistics()

    def freeze_statistics(self) -> None:
        for layer in self.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.eval()


class FrozenByHand(Frozen):
    """Manual optimization, two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            loss = nn.functional.cross_entropy(self.net(batch["image"]), batch["label"])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.losses.append(loss.detach())

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=rate) for rate in (0.05, 0.02)]
