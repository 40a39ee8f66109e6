"""`SlideClassifier`: one network from the pixels of a whole slide to its label."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAUROC

from wsi_trainer.models.backbones import VGG
from wsi_trainer.models.heads import AveragePooling, Pooling
from wsi_trainer.models.schedule import warmup_cosine
from wsi_trainer.models.standardise import RunningStandardise
from wsi_trainer.models.tasks import BinaryTask, Task


class SlideBatch(TypedDict):
    """One slide: its pixels (uint8, or already float in 0..1), the index of its class, and its name."""

    image: Tensor
    label: Tensor
    slide: str


class SlideClassifier(pl.LightningModule):
    """Backbone, head and task. Ordinary PyTorch: whether the image is dense or lazy is the strategy's
    concern.
    """

    def __init__(
        self,
        backbone: nn.Module | None = None,
        head: Callable[[int], Pooling] = AveragePooling,
        task: Task | None = None,
        learning_rate: float = 1e-3,
        weight_decay: float = 1e-4,
        warmup: float = 0.05,
        dropout: float = 0.0,
        mean: tuple[float, float, float] = (0.8, 0.7, 0.8),
        std: tuple[float, float, float] = (0.2, 0.2, 0.2),
    ) -> None:
        """Build the network.

        Args:
            backbone: From the slide to a map of features; a module with `out_channels` and `stride`.
            head: From the map to one vector.
            task: The classes, the loss and the probabilities.
            learning_rate: Peak learning rate of AdamW.
            weight_decay: Weight decay of AdamW, on weights of two or more dimensions.
            warmup: Share of all steps over which the learning rate rises.
            dropout: Dropout of the pooled vector.
            mean: Mean of each colour in 0..1 that is subtracted from the image.
            std: Standard deviation of each colour in 0..1 by which the image is divided.
        """
        super().__init__()
        self.backbone = VGG() if backbone is None else backbone
        self.head = head(_out_channels(self.backbone))
        self.task = BinaryTask() if task is None else task
        self.standardise = RunningStandardise(self.head.out_channels)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(self.head.out_channels, self.task.outputs)
        nn.init.zeros_(self.classifier.bias)
        self.val_auc = MulticlassAUROC(num_classes=len(self.task.classes), average="macro", thresholds=None)
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup = warmup
        self.register_buffer("mean", torch.tensor(mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(1, 3, 1, 1), persistent=False)
        self.mean: Tensor
        self.std: Tensor

    def normalise(self, image: Tensor) -> Tensor:
        """The image in the network's dtype, with about zero mean and unit variance in each colour."""
        scale = 255.0 if image.dtype == torch.uint8 else 1.0
        return (image.to(self.mean.dtype) / scale - self.mean) / self.std

    def forward(self, image: Tensor) -> Tensor:
        features = self.backbone(self.normalise(image))
        return self.classifier(self.dropout(self.standardise(self.head(features))))

    def training_step(self, batch: SlideBatch, batch_idx: int) -> Tensor:
        loss = self.task.loss(self(batch["image"]), batch["label"])
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=1)
        return loss

    def validation_step(self, batch: SlideBatch, batch_idx: int) -> None:
        logits = self(batch["image"])
        self.val_auc.update(self.task.probabilities(logits), batch["label"])
        self.log("val_loss", self.task.loss(logits, batch["label"]), on_epoch=True, batch_size=1)
        self.log("val_auc", self.val_auc, on_epoch=True, batch_size=1)

    def predict_step(self, batch: SlideBatch, batch_idx: int) -> Tensor:
        return self.task.probabilities(self(batch["image"]).float())

    def configure_optimizers(self):  # type: ignore[no-untyped-def]
        decayed = [p for p in self.parameters() if p.requires_grad and p.ndim >= 2]
        others = [p for p in self.parameters() if p.requires_grad and p.ndim < 2]
        groups = [
            {"params": decayed, "weight_decay": self.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = warmup_cosine(optimizer, steps, round(self.warmup * steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _out_channels(backbone: nn.Module) -> int:
    channels = getattr(backbone, "out_channels", None)
    if not isinstance(channels, int):
        raise TypeError(
            f"the backbone {type(backbone).__name__} has no integer attribute out_channels; "
            "set it to the number of channels of the map that it returns"
        )
    return channels
