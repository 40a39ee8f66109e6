"""`SlideClassifier`: one network from the pixels of a whole slide to its label."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_plugin import materialize
from wsi_trainer.models.layers import RunningStandardise
from wsi_trainer.models.slide_model import ModelConfig, SlideBatch, SlideModel, check_read, last_layer
from wsi_trainer.models.tissue_norm import TissueCells


class SlideClassifier(SlideModel):
    """Backbone, head and last layer: a prediction for each slide, which is seen at one or more magnifications."""

    def _build(self, config: ModelConfig, channels: int, cells: TissueCells | None) -> None:
        inputs = self._copies(channels, self.task, cells)
        self.standardise = RunningStandardise(inputs)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = last_layer(self.head, inputs, self.task.outputs)

    def forward(self, image: Tensor, context: Sequence[Tensor] = (), tissue: Sequence[Tensor] = ()) -> Tensor:
        """The logits of a slide, (1, outputs), given at one or more magnifications, and where each has tissue."""
        images = [image, *context]
        if len(images) != self.magnifications:
            raise ValueError(
                f"model.magnifications is {self.magnifications} and a slide has {len(images)} magnifications"
            )
        vectors = [self.pool(x, level, tissue[level] if tissue else None) for level, x in enumerate(images)]
        return self.forward_head(_side_by_side(vectors, self.head.branches))

    def pool(self, image: Tensor, level: int = 0, tissue: Tensor | None = None) -> Tensor:
        """The vector of one magnification."""
        head = self.head if level == 0 else self.context_heads[level - 1]
        return self._pooled(head, self._features(image, 0 if self.share_backbone else level, tissue), tissue)

    def forward_head(self, vector: Tensor) -> Tensor:
        """The logits of the pooled vector."""
        return self.classifier(self.dropout(self.standardise(vector)))

    def _logits(self, batch: SlideBatch) -> Tensor:
        """The logits of a slide as an ordinary tensor: what cannot be read shows here."""
        check_read(batch)
        return materialize(self(batch["image"], batch.get("context", ()), batch.get("tissue", ())))

    def _loss(self, batch: SlideBatch) -> Tensor:
        return self.task.loss(self._logits(batch), batch["label"])

    def _scored(self, batch: SlideBatch) -> tuple[Tensor, Tensor, Tensor]:
        logits = self._logits(batch)
        return self.task.loss(logits, batch["label"]), batch["label"], self.task.predict(logits.float())

    def _predicted(self, batch: SlideBatch) -> Tensor:
        return self.task.predict(self._logits(batch).float())


def _side_by_side(vectors: list[Tensor], branches: int) -> Tensor:
    """The vectors of all magnifications as one; those of a branch stay together."""
    if len(vectors) == 1:
        return vectors[0]
    return torch.cat([v.unflatten(1, (branches, -1)) for v in vectors], dim=2).flatten(1)
