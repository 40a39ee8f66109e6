"""`SlideSegmenter`: one network from the pixels of a whole slide to a class of each pixel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_plugin import materialize
from wsi_trainer.models.backbones import fitted
from wsi_trainer.models.heads import AveragePooling
from wsi_trainer.models.layers import RunningStandardise
from wsi_trainer.models.segmentation import SegmentationTask
from wsi_trainer.models.slide_model import ModelConfig, SlideBatch, SlideModel, check_read, last_layer
from wsi_trainer.models.tissue_norm import TissueCells


class SlideSegmenter(SlideModel):
    """Backbone and last layer, and a head where the task has a target of the slide too. Pixels are nowhere whole."""

    task: SegmentationTask

    def _build(self, config: ModelConfig, channels: int, cells: TissueCells | None) -> None:
        if self.magnifications > 1:
            raise ValueError(
                f"model.magnifications: {type(self.task).__name__} has a class for each pixel of one image; leave it "
                "out"
            )
        inputs = self._copies(channels, self.task.auxiliary, cells)
        given = {"head": type(self.head) is not AveragePooling, "pool_over": self.pool_over != "slide"}
        for key, changed in given.items():
            if changed and self.task.auxiliary is None:
                raise ValueError(
                    f"model.{key}: {type(self.task).__name__} has a class for each pixel and pools none; leave it out, "
                    "or give the task a target of the slide (model.task.init_args.auxiliary)"
                )
        self.standardise = nn.Identity() if self.task.auxiliary is None else RunningStandardise(inputs)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Conv2d(channels, self.task.outputs, 1)
        if self.task.auxiliary is not None:
            self.auxiliary = last_layer(self.head, inputs, self.task.auxiliary.outputs)

    def forward(self, image: Tensor, context: Sequence[Tensor] = (), tissue: Sequence[Tensor] = ()) -> Tensor:
        """The logits of each pixel, (1, outputs, height, width)."""
        if context:
            raise ValueError(f"model.magnifications is 1 and a slide has {1 + len(context)}")
        return self.at_pixels_and_pooled(image, tissue[0] if tissue else None)[0]

    def at_pixels_and_pooled(self, image: Tensor, tissue: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The logits of each pixel, enlarged between the positions of a backbone with a stride, and the pooled vector
        where the task has a target of the slide too.
        """
        features = self._features(image, 0, tissue)
        logits: Tensor = self.classifier(self.dropout(features))
        if self.stride > 1:
            logits = functional.interpolate(logits, scale_factor=float(self.stride), mode="bilinear")
        vector = None if self.task.auxiliary is None else self._pooled(self.head, features, tissue)
        return fitted(logits, image), vector

    def forward_auxiliary(self, vector: Tensor) -> Tensor:
        """The logits of the slide, of the vector pooled beside the logits of pixels."""
        return self.auxiliary(self.dropout(self.standardise(vector)))

    def _recorded(self, batch: SlideBatch) -> tuple[Tensor, Tensor | None]:
        """The logits of each pixel and the pooled vector, lazy where the image is.

        The vector is looked at when the rest of the step is recorded: then one run makes both.
        """
        check_read(batch)
        tissue = batch.get("tissue", ())
        return self.at_pixels_and_pooled(batch["image"], tissue[0] if tissue else None)

    def _loss(self, batch: SlideBatch) -> Tensor:
        logits, vector = self._recorded(batch)
        loss = materialize(self.task.loss(logits, batch["label"]))
        return loss + self._auxiliary_loss(self._of_slide(vector), batch)

    def _scored(self, batch: SlideBatch) -> tuple[Tensor, Tensor, Tensor]:
        logits, vector = self._recorded(batch)
        lazy, areas = self.task.loss(logits, batch["label"]), self.task.areas(logits, batch["label"])
        loss, of_slide = materialize(lazy), self._of_slide(vector)
        target = loss.new_zeros(1) if of_slide is None else batch["auxiliary"]
        return loss + self._auxiliary_loss(of_slide, batch), target, self._joined(materialize(areas), of_slide)

    def _predicted(self, batch: SlideBatch) -> Tensor:
        """The areas of pixels, or shares where no class of them is known, and the slide's prediction."""
        logits, vector = self._recorded(batch)
        known = batch["label"].ndim == logits.ndim
        found = materialize(self.task.areas(logits, batch["label"]) if known else self.task.predict(logits))
        return self._joined(found, self._of_slide(vector))

    def _of_slide(self, vector: Tensor | None) -> Tensor | None:
        """The logits of the slide as an ordinary tensor, where there is a vector."""
        return None if vector is None else self.forward_auxiliary(materialize(vector))

    def _auxiliary_loss(self, of_slide: Tensor | None, batch: SlideBatch) -> Tensor | float:
        """The part of the loss that is of the slide."""
        if of_slide is None or self.task.auxiliary is None:
            return 0.0
        return self.task.auxiliary_weight * self.task.auxiliary.loss(of_slide, batch["auxiliary"])

    def _joined(self, pixels: Tensor, of_slide: Tensor | None) -> Tensor:
        """The numbers of the pixels, and behind them the prediction of the slide."""
        if of_slide is None or self.task.auxiliary is None:
            return pixels
        return torch.cat([pixels, self.task.auxiliary.predict(of_slide.float()).to(pixels)], dim=1)
