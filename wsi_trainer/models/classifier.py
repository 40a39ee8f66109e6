"""`SlideClassifier`: one network from the pixels of a whole slide to its label, or to a class of each pixel."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lightning_plugin import materialize
from wsi_trainer.errors import UserError
from wsi_trainer.metrics import PredictionsError
from wsi_trainer.models.backbones import fitted, make_backbone
from wsi_trainer.models.finetune import Trained, freeze, parameter_groups, train_only, warmup_cosine
from wsi_trainer.models.heads import AveragePooling, Pooling
from wsi_trainer.models.layers import BranchLinear, RunningStandardise
from wsi_trainer.models.network_facts import describe
from wsi_trainer.models.pretrained import Match, load_pretrained
from wsi_trainer.models.segmentation import SegmentationTask
from wsi_trainer.models.tasks import BinaryTask, Owners, Task
from wsi_trainer.models.tissue_norm import over_tissue
from wsi_trainer.slide.errors import SlideError


class SlideBatch(TypedDict):
    """One slide: its pixels (uint8, or already float in 0..1), its target, and its name."""

    image: Tensor
    label: Tensor
    """As the task's `target` makes it; where each pixel has a class, the map of them, (1, 1, height, width)."""
    slide: str
    context: NotRequired[list[Tensor]]
    """The same slide at further magnifications, from fine to coarse."""
    beside: NotRequired[Tensor]
    """The target of the slide, where one is learnt beside that of each pixel."""
    tissue: NotRequired[list[Tensor]]
    """Which positions of the map count, (1, 1, h, w), for the image and for each of its context."""
    failure: NotRequired[str]
    """Why the slide could not be opened; there is no image then."""


class Gathered(Metric):
    """Keeps targets and predictions until the end of the epoch; with several devices those of all."""

    full_state_update = False
    targets: list[Tensor]
    predicted: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("targets", default=[], dist_reduce_fx="cat")
        self.add_state("predicted", default=[], dist_reduce_fx="cat")

    def update(self, target: Tensor, predicted: Tensor) -> None:
        self.targets.append(target.detach())
        self.predicted.append(predicted.detach())

    def compute(self) -> tuple[Tensor, Tensor]:
        """(rows, ...) targets and (rows, names) predictions."""
        if isinstance(self.targets, list) and not self.targets:  # several devices have joined them to tensors
            return torch.empty(0), torch.empty(0)
        return dim_zero_cat(self.targets), dim_zero_cat(self.predicted)

    def rows(self) -> tuple[Tensor, Tensor]:
        """What `compute` says, but a single row stays a row: a Metric makes a scalar of it."""
        with self.sync_context():
            return type(self).compute(self)


class Snapshot:
    """Gradients and buffers of a module before a step.

    Gradients are there only between the slides of one step of the optimizer. They are kept on the host: they do not
    count against the device's budget.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.gradients = [None if p.grad is None else _kept(p.grad) for p in module.parameters()]
        self.buffers = [_kept(buffer) for buffer in module.buffers()]

    @torch.no_grad()
    def restore(self) -> None:
        """Undo what the step did to gradients and buffers."""
        for parameter, gradient in zip(self.module.parameters(), self.gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        for buffer, value in zip(self.module.buffers(), self.buffers, strict=True):
            buffer.copy_(value)


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


COLOURS = (0.8, 0.7, 0.8), (0.2, 0.2, 0.2)
"""Mean and standard deviation of each colour of stained tissue and glass, about."""
OnFailure = Callable[[SlideBatch, str], None]
"""Told of a slide that cannot be read, and why."""


class SlideClassifier(pl.LightningModule):
    """Backbone, head and task.

    Ordinary PyTorch: whether the image is dense or lazy is the strategy's concern.
    """

    def __init__(
        self,
        backbone: nn.Module | str | None = None,
        head: Callable[[int], Pooling] = AveragePooling,
        task: Task | None = None,
        learning_rate: float = 1e-3,
        weight_decay: float = 1e-4,
        warmup: float = 0.05,
        layer_decay: float = 1.0,
        frozen_stages: int = 0,
        trained: Trained = "all",
        last_stages: int = 2,
        lora_rank: int = 8,
        lora_alpha: float = 16.0,
        pretrained: Path | None = None,
        dropout: float = 0.0,
        pool_over: Literal["slide", "tissue"] = "slide",
        statistics: Literal["slide", "tissue"] = "slide",
        levels: int = 1,
        share_levels: bool = False,
        mean: tuple[float, float, float] | None = None,
        std: tuple[float, float, float] | None = None,
    ) -> None:
        """Build the network.

        Args:
            backbone: From the slide to a map of features: a class of this package such as ResNet, timm:NAME, or the
                import path of any network that returns a map; a small VGG by default.
            head: From the map to one vector; a task with a class for each pixel takes the map itself, and pools it only
                for a target of the slide beside them.
            task: The target, the loss and the predictions; two classes, 0 and 1, by default.
            learning_rate: Peak learning rate of AdamW.
            weight_decay: Weight decay of AdamW, on weights of two or more dimensions.
            warmup: Share of all steps over which the learning rate rises; then it falls along half a cosine.
            layer_decay: Factor of the learning rate from each stage of the backbone to the one before; 1 trains all
                alike.
            frozen_stages: How many stages of the backbone, from the first on, are not trained and keep their
                statistics.
            trained: What of the backbone is trained: all of it; its last stages, of a ViT blocks and what follows them;
                lora, matrices of low rank beside its linear layers; norms, and biases; or none, the head alone.
            last_stages: With `trained: last`, how many stages.
            lora_rank: With `trained: lora`, the rank of these matrices.
            lora_alpha: With `trained: lora`, how much they count, times their rank.
            pretrained: File of weights of the backbone to start from; what of it matched is printed.
            dropout: Dropout of the pooled vector.
            pool_over: Which positions the head sees: all of the slide, or those with tissue.
            statistics: Over which positions the backbone's BatchNorm takes mean and variance in training.
            levels: Magnifications of the slide that are looked at: 1, and one for each of `data.context`.
            share_levels: Whether one backbone looks at all magnifications, or each has its own.
            mean: Mean of each colour in 0..1 that is subtracted from the image; by default that of a published encoder,
                or 0.8, 0.7, 0.8.
            std: Standard deviation of each colour in 0..1 by which the image is divided; by default that of a published
                encoder, or 0.2 of each.
        """
        super().__init__()
        if levels < 1:
            raise ValueError(f"model.levels is {levels}; it must be 1 or more")
        if not 0 < layer_decay <= 1:
            raise ValueError(f"model.layer_decay is {layer_decay}; it must be above 0 and at most 1")
        if learning_rate < 0 or weight_decay < 0:
            raise ValueError("model.learning_rate and model.weight_decay must be 0 or more")
        if not 0 <= warmup <= 1:
            raise ValueError(f"model.warmup is {warmup}; it is a share of all steps, from 0 to 1")
        self.backbone = make_backbone(backbone)
        own_mean, own_std = getattr(self.backbone, "colours", None) or COLOURS
        mean, std = mean or own_mean, std or own_std
        if min(std) <= 0:
            raise ValueError(f"model.std is {list(std)}; each colour's must be above 0")
        channels, self.stride = describe(self.backbone)
        cells = over_tissue(self.backbone, self.stride) if statistics == "tissue" else None
        self.task = BinaryTask() if task is None else task
        labels = self.task.beside if isinstance(self.task, SegmentationTask) else self.task
        self.head = _attached(head(channels), labels)
        copies = [copy.deepcopy((self.backbone, cells)) for _ in range(0 if share_levels else levels - 1)]
        self.context_backbones = nn.ModuleList(backbone for backbone, _ in copies)
        self._cells = [cells, *(its_own for _, its_own in copies)]
        self.context_heads = nn.ModuleList(_attached(head(channels), labels) for _ in range(levels - 1))
        inputs = self.head.out_channels * levels
        self.standardise = nn.Identity() if labels is None else RunningStandardise(inputs)
        self.dropout = nn.Dropout(dropout)
        self.beside: nn.Module = nn.Identity()  # the last layer of a target of the slide beside those of pixels
        if isinstance(self.task, SegmentationTask):
            _check_dense(self.task, self.head, levels, pool_over)
            self.classifier: nn.Module = nn.Conv2d(channels, self.task.outputs, 1)
            if labels is not None:
                self.beside = _last_layer(self.head, inputs, labels.outputs)
        else:
            self.classifier = _last_layer(self.head, inputs, self.task.outputs)
        self.gathered = Gathered()
        if frozen_stages and trained != "all":
            raise ValueError(f"model.trained is {trained}, which says what is frozen; leave out model.frozen_stages")
        if lora_rank < 1 or lora_alpha <= 0:
            raise ValueError("model.lora_rank must be 1 or more, and model.lora_alpha above 0")
        self.frozen = [
            part
            for b in self.backbones
            for part in (freeze(b, frozen_stages) or train_only(b, trained, last_stages, lora_rank, lora_alpha))
        ]
        self.pool_over, self.statistics = pool_over, statistics
        self.levels, self.share_levels = levels, share_levels
        self.learning_rate, self.weight_decay, self.warmup = learning_rate, weight_decay, warmup
        self.layer_decay, self.pretrained = layer_decay, pretrained
        self.on_failure: OnFailure | None = None
        self._before: Snapshot | None = None
        self._batch: SlideBatch | None = None
        self._spoilt: str | None = None  # the first slide validated whose prediction is not finite
        # Loss and slides of the epoch so far. Lightning's own mean begins anew where a run continues within an epoch.
        self.register_buffer("seen", torch.zeros(2))
        # Each process sums its own slides; DistributedDataParallel would put the first one's sum in place of it.
        self._ddp_params_and_buffers_to_ignore = ["seen"]
        self.register_buffer("mean", torch.tensor(mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(1, 3, 1, 1), persistent=False)
        self.seen: Tensor
        self.mean: Tensor
        self.std: Tensor

    @property
    def backbones(self) -> list[nn.Module]:
        """The backbones of all magnifications; one where they share it."""
        return [self.backbone, *self.context_backbones]

    @property
    def wants_tissue(self) -> bool:
        """Whether the network has to be told where a slide has tissue."""
        return "tissue" in (self.pool_over, self.statistics)

    def train(self, mode: bool = True) -> SlideClassifier:
        super().train(mode)
        for stage in self.frozen:
            stage.eval()
        return self

    def load_pretrained(self) -> Match | None:
        """Put the weights of `pretrained` into the backbones, and say what of them matched."""
        if self.pretrained is None:
            return None
        first, *_ = [load_pretrained(backbone, self.pretrained) for backbone in self.backbones]
        return first

    def normalise(self, image: Tensor) -> Tensor:
        """The image in the network's dtype, with about zero mean and unit variance in each colour."""
        if getattr(self.backbone, "prepared", False):
            return image.to(self.mean.dtype)
        scale = 255.0 if image.dtype == torch.uint8 else 1.0
        return (image.to(self.mean.dtype) / scale - self.mean) / self.std

    def forward(self, image: Tensor, context: Sequence[Tensor] = (), tissue: Sequence[Tensor] = ()) -> Tensor:
        """The logits of a slide, given at one or more magnifications, and where each has tissue.

        They are (1, outputs), or (1, outputs, height, width) for a task with a class for each pixel.
        """
        images = [image, *context]
        if len(images) != self.levels:
            raise ValueError(f"model.levels is {self.levels} and a slide has {len(images)} magnifications")
        if self.task.dense:
            return self.at_pixels(image, tissue[0] if tissue else None)
        vectors = [self.pool(x, level, tissue[level] if tissue else None) for level, x in enumerate(images)]
        return self.last(_side_by_side(vectors, self.head.branches))

    def pool(self, image: Tensor, level: int = 0, tissue: Tensor | None = None) -> Tensor:
        """The vector of one magnification."""
        head = self.head if level == 0 else self.context_heads[level - 1]
        return self._pooled(head, self._features(image, 0 if self.share_levels else level, tissue), tissue)

    def _pooled(self, head: nn.Module, features: Tensor, tissue: Tensor | None) -> Tensor:
        if tissue is None or self.pool_over == "slide":
            return head(features)
        return head(features, _fitted(tissue, features))

    def at_pixels(self, image: Tensor, tissue: Tensor | None = None) -> Tensor:
        """The logits of each pixel; where the backbone has a stride, they are enlarged between its positions."""
        return self._of_pixels(self._features(image, 0, tissue), image)

    def at_pixels_and_pooled(self, image: Tensor, tissue: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The logits of each pixel, and the pooled vector where the task has a target of the slide too."""
        features = self._features(image, 0, tissue)
        wanted = isinstance(self.task, SegmentationTask) and self.task.beside is not None
        return self._of_pixels(features, image), self._pooled(self.head, features, tissue) if wanted else None

    def last_beside(self, vector: Tensor) -> Tensor:
        """The logits of the slide, of the vector pooled beside the logits of pixels."""
        return self.beside(self.dropout(self.standardise(vector)))

    def _of_pixels(self, features: Tensor, image: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.dropout(features))
        if self.stride > 1:
            logits = functional.interpolate(logits, scale_factor=float(self.stride), mode="bilinear")
        return fitted(logits, image)

    def _features(self, image: Tensor, which: int, tissue: Tensor | None) -> Tensor:
        cells = self._cells[which]
        with nullcontext() if cells is None else cells.shown(tissue):
            return self.backbones[which](self.normalise(image))

    def last(self, vector: Tensor) -> Tensor:
        """The logits of the pooled vector."""
        return self.classifier(self.dropout(self.standardise(vector)))

    def training_step(self, batch: SlideBatch, batch_idx: int) -> Tensor | None:
        self._before = Snapshot(self) if self.on_failure else None
        try:
            loss = self._loss(batch)
        except SlideError as error:
            self._failed(batch, error)
            return None
        self._batch = batch
        self.seen += torch.stack([loss.detach().to(self.seen), torch.ones_like(self.seen[0])])
        self.log("train_loss_step", loss.detach(), on_step=True, on_epoch=False, batch_size=1)
        return loss

    def on_train_epoch_end(self) -> None:
        total, slides = self.seen
        self.log("train_loss", total / slides.clamp(min=1), sync_dist=True)
        self.seen.zero_()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        try:
            super().backward(loss, *args, **kwargs)
        except SlideError as error:
            assert self._batch is not None
            self._failed(self._batch, error)

    def validation_step(self, batch: SlideBatch, batch_idx: int) -> None:
        try:
            loss, target, predicted = self._scored(batch)
        except SlideError as error:
            self._failed(batch, error)
            return
        if self._spoilt is None and not predicted.isfinite().all():
            self._spoilt = batch["slide"]
        self.gathered.update(target, predicted)
        self.log("val_loss", loss, on_epoch=True, batch_size=1, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        targets, predicted = (values.double().cpu().numpy() for values in self.gathered.rows())
        self.gathered.reset()
        spoilt, self._spoilt = self._spoilt, None
        if not len(targets):
            raise UserError("no slide of the split val can be read, so no checkpoint can be chosen")
        names = tuple(map(str, range(len(targets))))  # scores of slides ask for nobody's name
        try:
            predictions = self.task.predictions(Owners(names, names), targets, predicted)
        except PredictionsError as error:
            if spoilt is None:
                raise
            raise UserError(
                f"the prediction of slide {spoilt} is not a finite number after step {self.trainer.global_step}: the "
                "weights have diverged; continue from a checkpoint before with a lower model.learning_rate"
            ) from error
        for name, score in self.task.scores.items():
            self.log(f"val_{name}", score(predictions))

    def predict_step(self, batch: SlideBatch, batch_idx: int) -> tuple[str, Tensor | None]:
        """The slide's name and prediction; None where it cannot be read and the run goes on without it."""
        try:
            return batch["slide"], self._predicted(batch)
        except SlideError as error:
            self._failed(batch, error)
            return batch["slide"], None

    def configure_optimizers(self):  # type: ignore[no-untyped-def]
        groups = parameter_groups(self, self.backbones, self.learning_rate, self.weight_decay, self.layer_decay)
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = warmup_cosine(optimizer, steps, round(self.warmup * steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _logits(self, batch: SlideBatch) -> Tensor:
        """The logits of a slide as an ordinary tensor: what cannot be read shows here."""
        check_read(batch)
        return materialize(self(batch["image"], batch.get("context", ()), batch.get("tissue", ())))

    def _recorded(self, batch: SlideBatch) -> tuple[Tensor, Tensor | None]:
        """The logits of each pixel and the pooled vector, lazy where the image is.

        The vector is looked at when the rest of the step is recorded: then one run makes both.
        """
        check_read(batch)
        tissue = batch.get("tissue", ())
        return self.at_pixels_and_pooled(batch["image"], tissue[0] if tissue else None)

    def _loss(self, batch: SlideBatch) -> Tensor:
        """The loss as an ordinary tensor; logits of pixels are nowhere whole."""
        if isinstance(self.task, SegmentationTask):
            logits, vector = self._recorded(batch)
            loss = materialize(self.task.loss(logits, batch["label"]))
            return loss + self._loss_beside(self.task, self._beside(vector), batch)
        return self.task.loss(self._logits(batch), batch["label"])

    def _beside(self, vector: Tensor | None) -> Tensor | None:
        """The logits of the slide as an ordinary tensor, where there is a vector."""
        return None if vector is None else self.last_beside(materialize(vector))

    def _loss_beside(self, task: SegmentationTask, beside: Tensor | None, batch: SlideBatch) -> Tensor | float:
        """The part of the loss that is of the slide."""
        if beside is None or task.beside is None:
            return 0.0
        return task.beside_weight * task.beside.loss(beside, batch["beside"])

    def _scored(self, batch: SlideBatch) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, the target and the prediction of a slide."""
        if isinstance(self.task, SegmentationTask):
            logits, vector = self._recorded(batch)
            lazy, areas = self.task.loss(logits, batch["label"]), self.task.areas(logits, batch["label"])
            loss, beside = materialize(lazy), self._beside(vector)
            target = loss.new_zeros(1) if beside is None else batch["beside"]
            predicted = self._with_beside(self.task, materialize(areas), beside)
            return loss + self._loss_beside(self.task, beside, batch), target, predicted
        logits = self._logits(batch)
        return self.task.loss(logits, batch["label"]), batch["label"], self.task.predict(logits.float())

    def _predicted(self, batch: SlideBatch) -> Tensor:
        """What is kept of a slide: of pixels the areas, or where nothing is known of them what is found."""
        if not isinstance(self.task, SegmentationTask):
            return self.task.predict(self._logits(batch).float())
        logits, vector = self._recorded(batch)
        known = batch["label"].ndim == logits.ndim
        found = materialize(self.task.areas(logits, batch["label"]) if known else self.task.predict(logits))
        return self._with_beside(self.task, found, self._beside(vector))

    def _with_beside(self, task: SegmentationTask, pixels: Tensor, beside: Tensor | None) -> Tensor:
        """What is kept of the pixels, and behind it what is predicted of the slide."""
        if beside is None or task.beside is None:
            return pixels
        return torch.cat([pixels, task.beside.predict(beside.float()).to(pixels)], dim=1)

    def _failed(self, batch: SlideBatch, error: SlideError) -> None:
        """Leave a slide out, if the run may go on without it."""
        if self.on_failure is None:
            raise error
        # An error that came through a reader's thread is referred to by frames that it refers to itself. With them the
        # step's tensors would stay, and be computed when it ends.
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__
        if self.training and self._before is not None:
            self._before.restore()
        self.on_failure(batch, error.reason)


def check_read(batch: SlideBatch) -> None:
    """Raise an error where the slide could not be opened."""
    if "failure" in batch:
        raise SlideError(batch["slide"], batch["failure"])


def _attached(head: Pooling, task: Task | None) -> Pooling:
    if task is not None:
        head.attach(task.outputs)
    return head


def _check_dense(task: SegmentationTask, head: Pooling, levels: int, pool_over: str) -> None:
    """Refuse what has no meaning where no vector is pooled."""
    if levels > 1:
        raise ValueError(f"model.levels: {type(task).__name__} has a class for each pixel of one image; leave it out")
    given = {"head": type(head) is not AveragePooling, "pool_over": pool_over != "slide"}
    for key, changed in given.items():
        if changed and task.beside is None:
            raise ValueError(
                f"model.{key}: {type(task).__name__} has a class for each pixel and pools none; leave it out, or give "
                "the task a target of the slide (model.task.init_args.beside)"
            )


def _last_layer(head: Pooling, inputs: int, outputs: int) -> nn.Module:
    if head.branches > 1:
        return BranchLinear(inputs, outputs)
    layer = nn.Linear(inputs, outputs)
    nn.init.zeros_(layer.bias)
    return layer


def _side_by_side(vectors: list[Tensor], branches: int) -> Tensor:
    """The vectors of all magnifications as one; those of a branch stay together."""
    if len(vectors) == 1:
        return vectors[0]
    return torch.cat([v.unflatten(1, (branches, -1)) for v in vectors], dim=2).flatten(1)


def _fitted(tissue: Tensor, features: Tensor) -> Tensor:
    """The map of tissue in the features' size and type: a network that rounds down has a position less at the end."""
    height, width = features.shape[2:]
    if tissue.shape[2] < height or tissue.shape[3] < width:
        raise ValueError(
            f"the backbone returns {height} × {width} positions where its stride gives {tissue.shape[2]} × "
            f"{tissue.shape[3]}; correct its attribute stride"
        )
    return tissue[:, :, :height, :width].to(features.dtype)
