"""Base of the classifier and the segmenter: configuration, backbones, training steps, slides that cannot be read."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.metrics import PredictionsError
from wsi_trainer.models.backbones import describe, make_backbone
from wsi_trainer.models.finetune import FineTune, freeze, parameter_groups, train_only, warmup_cosine
from wsi_trainer.models.heads import AveragePooling, Pooling
from wsi_trainer.models.layers import BranchLinear
from wsi_trainer.models.pretrained import Match, load_pretrained
from wsi_trainer.models.tasks import BinaryTask, Owners, Task
from wsi_trainer.models.tissue_norm import TissueCells, over_tissue

COLOURS = (0.8, 0.7, 0.8), (0.2, 0.2, 0.2)
"""Mean and standard deviation of each colour of stained tissue and background, about."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelConfig:
    """Backbone, head and task, and how they are trained."""

    backbone: nn.Module | str | None = None
    """From the slide to a map of features: a class of this package such as ResNet, timm:NAME, or the import path of any
    network that returns a map; a small VGG by default.
    """
    head: Callable[[int], Pooling] = AveragePooling
    """From the map to one vector; a task with a class for each pixel takes the map itself, and pools it only for a
    target of the slide beside them.
    """
    task: Task | None = None
    """The target, the loss and the predictions; two classes, 0 and 1, by default."""
    learning_rate: float = 1e-3
    """Peak learning rate of AdamW."""
    weight_decay: float = 1e-4
    """Weight decay of AdamW, on weights of two or more dimensions."""
    warmup: float = 0.05
    """Share of all steps over which the learning rate rises; then it falls along half a cosine."""
    layer_decay: float = 1.0
    """Factor of the learning rate from each stage of the backbone to the one before; 1 trains all alike."""
    frozen_stages: int = 0
    """How many stages of the backbone, from the first on, are not trained and keep their statistics."""
    finetune: FineTune = "all"
    """The part of the backbone that is trained: all; last, its last stages, of a ViT blocks and all that follows; lora,
    matrices of low rank beside its linear layers; norms, and biases; or none, the head alone.
    """
    last_stages: int = 2
    """Number of stages that are trained where `finetune` is `last`."""
    lora_rank: int = 8
    """Rank of the matrices of LoRA, where `finetune` is `lora`."""
    lora_alpha: float = 16.0
    """Factor of the matrices of LoRA, times their rank."""
    pretrained: Path | None = None
    """File of weights of the backbone to start from; what of it matched is printed."""
    dropout: float = 0.0
    """Dropout of the pooled vector."""
    pool_over: Literal["slide", "tissue"] = "slide"
    """Positions that the head sees: all of the slide, or those with tissue."""
    batchnorm_over: Literal["slide", "tissue"] = "slide"
    """Positions over which the backbone's BatchNorm takes mean and variance in training."""
    magnifications: int = 1
    """Magnifications of the slide that are looked at: 1, and one for each of `data.extra_downsamples`."""
    share_backbone: bool = False
    """Whether one backbone looks at all magnifications, or each has its own."""
    mean: tuple[float, float, float] | None = None
    """Mean of each colour in 0..1 that is subtracted from the image; by default that of a published encoder, or 0.8,
    0.7, 0.8.
    """
    std: tuple[float, float, float] | None = None
    """Standard deviation of each colour in 0..1 by which the image is divided; by default that of a published encoder,
    or 0.2 of each.
    """

    def __post_init__(self) -> None:
        if self.magnifications < 1:
            raise ValueError(f"model.magnifications is {self.magnifications}; it must be 1 or more")
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"model.layer_decay is {self.layer_decay}; it must be above 0 and at most 1")
        if self.learning_rate < 0 or self.weight_decay < 0:
            raise ValueError("model.learning_rate and model.weight_decay must be 0 or more")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"model.warmup is {self.warmup}; it is a share of all steps, from 0 to 1")
        if self.std is not None and min(self.std) <= 0:
            raise ValueError(f"model.std is {list(self.std)}; each colour's must be above 0")
        if self.frozen_stages and self.finetune != "all":
            raise ValueError(
                f"model.finetune is {self.finetune}, which says what is frozen; leave out model.frozen_stages"
            )
        if self.lora_rank < 1 or self.lora_alpha <= 0:
            raise ValueError("model.lora_rank must be 1 or more, and model.lora_alpha above 0")


class SlideBatch(TypedDict):
    """One slide: its pixels (uint8, or already float in 0..1), its target, and its name."""

    image: Tensor
    label: Tensor
    """As the task's `target` makes it; where each pixel has a class, the map of them, (1, 1, height, width)."""
    slide: str
    context: NotRequired[list[Tensor]]
    """The same slide at further magnifications, from fine to coarse."""
    auxiliary: NotRequired[Tensor]
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
        if not len(self.targets):  # a list, or a tensor where several devices have joined them
            return torch.empty(0), torch.empty(0)
        return dim_zero_cat(self.targets), dim_zero_cat(self.predicted)

    def rows(self) -> tuple[Tensor, Tensor]:
        """Targets and predictions as rows, also of a single slide, of which a Metric's `compute` makes a scalar."""
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


OnFailure = Callable[[SlideBatch, str], None]
"""Told of a slide that cannot be read, and why."""


class SlideModel(pl.LightningModule):
    """Backbone, head and task, and the steps of training them.

    Ordinary PyTorch: whether the image is dense or lazy is the strategy's concern. What a batch means is that of
    `SlideClassifier` and `SlideSegmenter`.
    """

    standardise: nn.Module

    def __init__(self, config: ModelConfig | None = None, **keys: Any) -> None:
        """Build the network.

        Args:
            config: The configuration; without it that of `keys`.
            keys: Fields of `ModelConfig`.
        """
        super().__init__()
        self.config = config = config or ModelConfig(**keys)
        self.pool_over, self.magnifications, self.share_backbone = (
            config.pool_over,
            config.magnifications,
            config.share_backbone,
        )
        self.pretrained = config.pretrained
        self.backbone = make_backbone(config.backbone)
        own_mean, own_std = getattr(self.backbone, "colours", None) or COLOURS
        channels, self.stride = describe(self.backbone)
        cells = over_tissue(self.backbone, self.stride) if config.batchnorm_over == "tissue" else None
        self.task = BinaryTask() if config.task is None else config.task
        self._build(config, channels, cells)
        self.gathered = Gathered()
        how = config.finetune, config.last_stages, config.lora_rank, config.lora_alpha
        self.frozen = [p for b in self.backbones for p in (freeze(b, config.frozen_stages) or train_only(b, *how))]
        self.on_failure: OnFailure | None = None
        self._before: Snapshot | None = None
        self._batch: SlideBatch | None = None
        self._spoilt: str | None = None  # the first slide validated whose prediction is not finite
        # Loss and slides of the epoch so far. Lightning's own mean begins anew where a run continues within an epoch.
        self.register_buffer("seen", torch.zeros(2))
        # Each process sums its own slides; DistributedDataParallel would put the first one's sum in place of it.
        self._ddp_params_and_buffers_to_ignore = ["seen"]
        self.register_buffer("mean", torch.tensor(config.mean or own_mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(config.std or own_std).view(1, 3, 1, 1), persistent=False)
        self.seen: Tensor
        self.mean: Tensor
        self.std: Tensor

    def _build(self, config: ModelConfig, channels: int, cells: TissueCells | None) -> None:
        """Make the heads and last layers; they are made between the backbone and what is frozen of it."""
        raise NotImplementedError

    def _copies(self, channels: int, task: Task | None, cells: TissueCells | None) -> int:
        """Make the heads, and backbones for further magnifications; returns the entries of all vectors."""
        head = self.config.head
        self.head = _attached(head(channels), task)
        copies = [
            copy.deepcopy((self.backbone, cells)) for _ in range(0 if self.share_backbone else self.magnifications - 1)
        ]
        self.context_backbones = nn.ModuleList(backbone for backbone, _ in copies)
        self._cells = [cells, *(its_own for _, its_own in copies)]
        self.context_heads = nn.ModuleList(_attached(head(channels), task) for _ in range(self.magnifications - 1))
        return self.head.out_channels * self.magnifications

    def _loss(self, batch: SlideBatch) -> Tensor:
        """The loss of a slide as an ordinary tensor."""
        raise NotImplementedError

    def _scored(self, batch: SlideBatch) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, the target and the prediction of a slide."""
        raise NotImplementedError

    def _predicted(self, batch: SlideBatch) -> Tensor:
        """The prediction of a slide."""
        raise NotImplementedError

    @property
    def backbones(self) -> list[nn.Module]:
        """The backbones of all magnifications; one where they share it."""
        return [self.backbone, *self.context_backbones]

    @property
    def wants_tissue(self) -> bool:
        """True where the network needs a map of tissue."""
        return "tissue" in (self.pool_over, self.config.batchnorm_over)

    @property
    def tissue_stride(self) -> int | None:
        """Pixels for one position of the map of tissue, where the network needs one."""
        return self.stride if self.wants_tissue else None

    def train(self, mode: bool = True) -> SlideModel:
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

    def _pooled(self, head: nn.Module, features: Tensor, tissue: Tensor | None) -> Tensor:
        if tissue is None or self.pool_over == "slide":
            return head(features)
        return head(features, _fitted(tissue, features))

    def _features(self, image: Tensor, which: int, tissue: Tensor | None) -> Tensor:
        cells = self._cells[which]
        with nullcontext() if cells is None else cells.shown(tissue):
            return self.backbones[which](self.normalise(image))

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
        groups = parameter_groups(
            self, self.backbones, self.config.learning_rate, self.config.weight_decay, self.config.layer_decay
        )
        optimizer = torch.optim.AdamW(groups, lr=self.config.learning_rate)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = warmup_cosine(optimizer, steps, round(self.config.warmup * steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

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


def last_layer(head: Pooling, inputs: int, outputs: int) -> nn.Module:
    if head.branches > 1:
        return BranchLinear(inputs, outputs)
    layer = nn.Linear(inputs, outputs)
    nn.init.zeros_(layer.bias)
    return layer


def _fitted(tissue: Tensor, features: Tensor) -> Tensor:
    """The map of tissue in the features' size and type: a network that rounds down has a position less at the end."""
    height, width = features.shape[2:]
    if tissue.shape[2] < height or tissue.shape[3] < width:
        raise ValueError(
            f"the backbone returns {height} × {width} positions where its stride gives {tissue.shape[2]} × "
            f"{tissue.shape[3]}; correct its attribute stride"
        )
    return tissue[:, :, :height, :width].to(features.dtype)
