"""`SlideClassifier` and `SlideSegmenter`: from the pixels of a slide to its label, or to a class of each pixel."""

from __future__ import annotations

import copy
import math
import traceback
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, cast

import pytorch_lightning as pl
import torch
from jsonargparse import ArgumentParser
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lightning_plugin import materialize
from wsi_trainer.data.covariates import Covariates
from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.io.files import as_written
from wsi_trainer.io.untrusted import read_yaml
from wsi_trainer.metrics import PredictionsError
from wsi_trainer.models.allowed import about, check_backbone, denied, is_limited, limited
from wsi_trainer.models.backbones import NoSlide, describe, fitted, make_backbone
from wsi_trainer.models.batch import FORMER, SlideBatch, deprecate
from wsi_trainer.models.finetune import FineTune, apart, freeze, parameter_groups, train_only, warmup_cosine
from wsi_trainer.models.heads import AveragePooling, Pooling
from wsi_trainer.models.hub import CONFIG, WEIGHTS, folder_of
from wsi_trainer.models.segmentation import SegmentationTask
from wsi_trainer.models.slide_encoders.published import check_published
from wsi_trainer.models.targets import MultiTargetTask
from wsi_trainer.models.tasks import BinaryTask, Owners, Task
from wsi_trainer.models.tissue_norm import TissueCells, over_tissue
from wsi_trainer.models.weights import Match, load_pretrained, load_weights, present_weights

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
    targets: dict[str, Task] | None = None
    """Several targets by name, instead of `task`, learnt together; the first is the main one. A slide needs a label of
    one of them. Scores of the others have their name and _ before them.
    """
    target_weights: dict[str, float] | None = None
    """Factor of the loss of each of `targets`; 1 of those that are not named."""
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
    """File of weights of the backbone to start from, or hf-hub:USER/MODEL of Hugging Face's hub, from which it is
    downloaded once; what of it matched is printed.
    """
    head_pretrained: Path | None = None
    """File of weights of the head to start from, of a published slide encoder, or hf-hub:USER/MODEL, or
    hf-hub:USER/MODEL/FILE; what of it matched is printed.
    """
    finetune_head: Literal["all", "none"] = "all"
    """Whether the head is trained with the last layer, or the last layer alone."""
    dropout: float = 0.0
    """Dropout of the pooled vector."""
    covariates: dict[str, Any] | list[str] | None = None
    """Columns of the manifest that are joined to the pooled vector before the last layer: [age, sex], or
    {age: number, sex: category}. `fit` finds their means, deviations and categories on the training slides, and keeps
    them here.
    """
    covariates_learning_rate: float = 0.03
    """Peak learning rate of the weights of covariates: they are few, and each has farther to go than one of hundreds of
    the slide's.
    """
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
        for name in ("learning_rate", "weight_decay", "covariates_learning_rate"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"model.{name} is {getattr(self, name)}; it must be 0 or more")
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
        if self.finetune_head == "none" and self.head_pretrained is None:
            raise ValueError(
                "model.finetune_head is none, and the head would keep random weights; give model.head_pretrained"
            )
        if self.targets is not None and (self.task is not None or not self.targets):
            raise ValueError("model.targets and model.task both say what is learnt; give one of them, with a target")
        if self.target_weights is not None and self.targets is None:
            raise ValueError("model.target_weights is for model.targets, which is not given")

    def whole_task(self) -> Task:
        """The task of all targets."""
        if self.targets is None:
            return BinaryTask() if self.task is None else self.task.whole
        if len(self.targets) == 1 and not self.target_weights:
            return next(iter(self.targets.values()))
        return MultiTargetTask(self.targets, self.target_weights)


class RunningStandardise(nn.Module):
    """Subtract the running mean and divide by the running standard deviation, in training as in evaluation.

    Pooled features of two slides differ by a few per cent of their mean, so a linear layer on them first
    has to learn to cancel that mean. BatchNorm would take it away, but with one slide in a batch there is
    no batch to take it from; the statistics of the slides seen so far serve instead. They are constants to
    the gradient.
    """

    def __init__(self, channels: int, momentum: float = 0.02, relative_floor: float = 0.01) -> None:
        """Build the layer.

        Args:
            channels: Entries of the vector.
            momentum: Weight of the newest slide once more than 1 / momentum slides were seen; until then
                all count alike.
            relative_floor: Smallest standard deviation, as a share of the mean: what varies less is not
                blown up.
        """
        super().__init__()
        self.momentum = momentum
        self.relative_floor = relative_floor
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("variance", torch.ones(channels))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.mean: Tensor
        self.variance: Tensor
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self._update(x.detach())
        floor = (self.relative_floor * self.mean) ** 2
        return (x - self.mean) * torch.rsqrt(self.variance + floor + 1e-8)

    @torch.no_grad()
    def _update(self, x: Tensor) -> None:
        self.seen += 1
        seen = int(self.seen)
        weight = max(self.momentum, 1 / seen)
        newest = x.mean(dim=0).to(self.mean.dtype)
        # In place is safe also with accumulation: backward needs neither of the two, only what was made of them.
        self.mean.lerp_(newest, weight)
        if seen > 1:
            self.variance.lerp_((newest - self.mean) ** 2, weight)


class BranchLinear(nn.Module):
    """Each output is a linear function of its own vector alone, out of `outputs` vectors side by side."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs // outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return (x.unflatten(1, tuple(self.weight.shape)) * self.weight).sum(dim=2) + self.bias


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
        self.task = config.whole_task()
        self.covariates = Covariates.of(config.covariates)
        self._build(config, channels, cells)
        if self.covariates and not self.slide_outputs:
            raise ValueError(f"model.covariates are for a target of the slide, which {type(self.task).__name__} is not")
        if self.covariates.width:
            self.covariate_classifier = _zeros(self.covariates.width, self.slide_outputs)
        self.gathered = Gathered()
        how = config.finetune, config.last_stages, config.lora_rank, config.lora_alpha
        self.frozen = [p for b in self.backbones for p in (freeze(b, config.frozen_stages) or train_only(b, *how))]
        if config.finetune_head == "none":
            self.frozen += [head.requires_grad_(False) for head in self.heads]
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

    def _copies(self, channels: int, cells: TissueCells | None) -> int:
        """Make the heads, and backbones for further magnifications; returns the entries of all vectors."""
        head, outputs = self.config.head, self.slide_outputs
        self.head = _attached(head(channels), outputs)
        copies = [
            copy.deepcopy((self.backbone, cells)) for _ in range(0 if self.share_backbone else self.magnifications - 1)
        ]
        self.context_backbones = nn.ModuleList(backbone for backbone, _ in copies)
        self._cells = [cells, *(its_own for _, its_own in copies)]
        self.context_heads = nn.ModuleList(_attached(head(channels), outputs) for _ in range(self.magnifications - 1))
        return self.head.out_channels * self.magnifications

    @property
    def sees_slide(self) -> bool:
        """False of a network that takes covariates alone, for which no slide is opened."""
        return not isinstance(self.backbone, NoSlide)

    def with_covariates(self, logits: Tensor, covariates: Tensor | None) -> Tensor:
        """The logits with the part of the covariates: the last layer is linear in the pooled vector and them together.

        Args:
            logits: The part of the pooled vector.
            covariates: (1, width), as `Covariates.table` has them.
        """
        given = 0 if covariates is None else covariates.shape[1]
        if given != self.covariates.width:
            raise ValueError(
                f"the model takes {self.covariates.width} numbers of model.covariates beside a slide, and not {given}"
            )
        if covariates is None:
            return logits
        return logits + self.covariate_classifier(covariates.to(self.covariate_classifier.weight))

    def _targets(self, batch: SlideBatch) -> Mapping[str, Tensor]:
        """The targets that are known, also of a batch that somebody has made as for 1.0."""
        if "targets" in batch:
            return batch["targets"]
        given = [key for key in FORMER if key in batch]
        for key in given:
            deprecate(key)
        return {name: cast(Any, batch)[key] for name, key in zip(self.task.by_target, given)}

    def _loss(self, batch: SlideBatch) -> Tensor:
        """The loss of a slide as an ordinary tensor."""
        raise NotImplementedError

    def _scored(self, batch: SlideBatch) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, the target and the prediction of a slide."""
        raise NotImplementedError

    def predicted(self, batch: SlideBatch) -> Tensor:
        """The prediction of a slide."""
        raise NotImplementedError

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: str | Path, map_location: torch.device | str | None = None, **keys: Any
    ) -> Self:
        """The model of a checkpoint in evaluation mode.

        Args:
            checkpoint_path: A checkpoint of `wsi-train fit`, in the folder of its run, which says what the network is;
                or any other one, with the network's `config`.
            map_location: The device of the model; by default the processor.
            keys: As for the constructor, `config` or fields of `ModelConfig`, for a checkpoint outside of a run.
        """
        path = Path(checkpoint_path)
        config = path.absolute().parent.parent / "config.yaml"
        model: Any = cls(**keys) if keys or not config.is_file() else make_model(_config_in(config))
        try:
            load_weights(model, path)
        except UserError as error:
            if not keys and config.is_file():
                raise
            raise UserError(
                f"{path} is of another network than {cls.__name__} with these keys, and in no folder of a run, "
                "which says what its network is; give the network's config"
            ) from error
        return cls._of_its_class(model, path).to(map_location or "cpu")

    @classmethod
    def from_pretrained(cls, name: str | Path, **download: Any) -> Self:
        """The model of an exported folder, or of a name on Hugging Face's hub, in evaluation mode.

        `Predictor.from_pretrained` also knows how slides are shown to it.

        Args:
            name: The folder, or the name.
            download: Arguments of `huggingface_hub.snapshot_download`, such as `revision`.
        """
        folder = folder_of(name, **download)
        model = make_model(_config_in(folder / CONFIG))
        load_weights(model, folder / WEIGHTS)
        return cls._of_its_class(model, folder)

    @classmethod
    def _of_its_class(cls, model: SlideModel, path: Path) -> Self:
        if not isinstance(model, cls):
            kind = type(model).__name__
            raise UserError(f"{path} is of a {kind}: load it by {kind}, or by Predictor")
        return model.eval()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = present_weights(checkpoint["state_dict"])

    @property
    def backbones(self) -> list[nn.Module]:
        """The backbones of all magnifications; one where they share it."""
        return [self.backbone, *self.context_backbones]

    @property
    def heads(self) -> list[Pooling]:
        """The heads of all magnifications."""
        return [self.head, *cast(Iterable[Pooling], self.context_heads)]

    @property
    def slide_outputs(self) -> int:
        """Logits of the targets of slides; 0 where all targets are of pixels."""
        return sum(part.task.outputs for part in self.task.slide_parts)

    @property
    def wants_tissue(self) -> bool:
        """True where the network needs a map of tissue."""
        return "tissue" in (self.pool_over, self.config.batchnorm_over)

    @property
    def wants_places(self) -> bool:
        """True where the head asks for the places of patches."""
        return self.head.wants_places

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

    def load_pretrained_head(self) -> Match | None:
        """Put the weights of `head_pretrained` into the heads, and say what of them matched."""
        if (path := self.config.head_pretrained) is None:
            return None
        check_published(self.head, describe(self.backbone)[0], self.backbone)
        first, *_ = [load_pretrained(head, path, "model.head_pretrained") for head in self.heads]
        return first

    def normalise(self, image: Tensor) -> Tensor:
        """The image in the network's dtype, with about zero mean and unit variance in each colour."""
        if getattr(self.backbone, "prepared", False):
            return image.to(self.mean.dtype)
        scale = 255.0 if image.dtype == torch.uint8 else 1.0
        return (image.to(self.mean.dtype) / scale - self.mean) / self.std

    def _pooled(self, head: Pooling, features: Tensor, tissue: Tensor | None, places: Tensor | None = None) -> Tensor:
        pooled: Tensor = head(features, self._counts(features, tissue), **self._beside(head, places))
        return pooled

    def _beside(self, head: Pooling, places: Tensor | None) -> dict[str, Tensor | None]:
        """The places of patches, for a head that asks for them."""
        return {"places": places} if head.wants_places else {}

    def _counts(self, features: Tensor, tissue: Tensor | None) -> Tensor | None:
        """Mask of the positions that count to the head; None where all do."""
        return None if tissue is None or self.pool_over == "slide" else at_positions(tissue, features)

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

    def configure_optimizers(self):  # type: ignore[no-untyped-def]
        groups = parameter_groups(
            self, self.backbones, self.config.learning_rate, self.config.weight_decay, self.config.layer_decay
        )
        if not self.covariates.fitted:
            raise ValueError(
                f"model.covariates are {self.covariates}; before training give what Covariates.fit finds on the slides "
                "of training"
            )
        if self.covariates:
            own = list(self.covariate_classifier.parameters())
            own += [] if self.sees_slide else list(cast(nn.Module, self.classifier).parameters())
            groups = apart(groups, own, self.config.covariates_learning_rate)
        optimizer = torch.optim.AdamW(groups, lr=self.config.learning_rate)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = warmup_cosine(optimizer, steps, round(self.config.warmup * steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _failed(self, batch: SlideBatch, error: SlideError) -> None:
        """Leave a slide out, if the run may go on without it."""
        if self.on_failure is None:
            raise error
        forget(error)
        if self.training and self._before is not None:
            self._before.restore()
        self.on_failure(batch, error.reason)


def forget(error: BaseException) -> None:
    """Let go of the tensors of a step that has failed.

    An error that came through a reader's thread is referred to by frames that it refers to itself. With them the step's
    tensors would stay, and be computed when it ends.
    """
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__


def check_read(batch: SlideBatch) -> None:
    """Raise an error where the slide could not be opened."""
    if "failure" in batch:
        raise SlideError(batch["slide"], batch["failure"])


def _attached(head: Pooling, outputs: int) -> Pooling:
    if outputs:
        head.attach(outputs)
    return head


def _zeros(inputs: int, outputs: int) -> nn.Linear:
    """A layer that says nothing yet, and draws no random number: the slide begins as in a run without covariates."""
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=False)
    nn.init.zeros_(layer.weight)
    return cast(nn.Linear, layer)


def last_layer(head: Pooling, inputs: int, outputs: int) -> nn.Module:
    if head.branches > 1:
        return BranchLinear(inputs, outputs)
    layer = nn.Linear(inputs, outputs)
    nn.init.zeros_(layer.bias)
    return layer


def at_positions(values: Tensor, features: Tensor) -> Tensor:
    """A map of one number for each position, in the features' size and type: a network may round down at the end."""
    height, width = features.shape[2:]
    if values.shape[2] < height or values.shape[3] < width:
        raise ValueError(
            f"the backbone returns {height} × {width} positions where its stride gives {values.shape[2]} × "
            f"{values.shape[3]}; correct its attribute stride"
        )
    return values[:, :, :height, :width].to(features.dtype)


class SlideClassifier(SlideModel):
    """Backbone, head and last layer: predictions for each slide, which is seen at one or more magnifications."""

    def _build(self, config: ModelConfig, channels: int, cells: TissueCells | None) -> None:
        inputs = self._copies(channels, cells)
        self.standardise = RunningStandardise(inputs)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = last_layer(self.head, inputs, self.slide_outputs)

    def forward(
        self, image: Tensor, context: Sequence[Tensor] = (), tissue: Sequence[Tensor] = (), *,
        places: Tensor | None = None, covariates: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The logits of a slide, (1, outputs), given at one or more magnifications, where each has tissue, where its
        patches lie, and with its covariates, (1, width).
        """
        images = [image, *context]
        if len(images) != self.magnifications:
            raise ValueError(
                f"model.magnifications is {self.magnifications} and a slide has {len(images)} magnifications"
            )
        vectors = [self.pool(x, level, tissue[level] if tissue else None, places) for level, x in enumerate(images)]
        together = vectors[0]
        if len(vectors) > 1:  # vectors of a branch stay together
            together = torch.cat([v.unflatten(1, (self.head.branches, -1)) for v in vectors], dim=2).flatten(1)
        return self.forward_head(together, covariates)

    def pool(self, image: Tensor, level: int = 0, tissue: Tensor | None = None, places: Tensor | None = None) -> Tensor:
        """The vector of one magnification."""
        features = self._features(image, 0 if self.share_backbone else level, tissue)
        return self.pool_features(features, level, tissue, places)

    def pool_features(
        self, features: Tensor, level: int = 0, tissue: Tensor | None = None, places: Tensor | None = None
    ) -> Tensor:
        """The vector of one magnification, from the map of its features."""
        return self._pooled(self.heads[level], features, tissue, places)

    def scores(self, image: Tensor, tissue: Sequence[Tensor] = (), places: Tensor | None = None) -> Tensor:
        """The logit of attention of each position at the finest magnification, (1, branches, h, w).

        Of a bag or of features, (1, branches, patches, 1): one for each patch, whose places the bag or the features
        have. A head without attention has none (`head.attends`).
        """
        shown = tissue[0] if tissue else None
        features = self._features(image, 0, shown)
        return self.head.scores(features, self._counts(features, shown), **self._beside(self.head, places))

    def forward_head(self, vector: Tensor, covariates: Tensor | None = None) -> Tensor:
        """The logits of the pooled vector and the covariates."""
        return self.with_covariates(self.classifier(self.dropout(self.standardise(vector))), covariates)

    def _logits(self, batch: SlideBatch) -> Tensor:
        """The logits of a slide as an ordinary tensor: what cannot be read shows here."""
        check_read(batch)
        seen = batch["image"], batch.get("context", ()), batch.get("tissue", ())
        return materialize(self(*seen, places=batch.get("places"), covariates=batch.get("covariates")))

    def _loss(self, batch: SlideBatch) -> Tensor:
        return self.task.loss_of(self._logits(batch), self._targets(batch))

    def _scored(self, batch: SlideBatch) -> tuple[Tensor, Tensor, Tensor]:
        logits, targets = self._logits(batch), self._targets(batch)
        return self.task.loss_of(logits, targets), self.task.row(targets), self.task.predict(logits.float())

    def predicted(self, batch: SlideBatch) -> Tensor:
        return self.task.predict(self._logits(batch).float())


class SlideSegmenter(SlideModel):
    """Backbone and last layer, and a head where there are targets of the slide too. Pixels are nowhere whole."""

    def _build(self, config: ModelConfig, channels: int, cells: TissueCells | None) -> None:
        if self.magnifications > 1:
            raise ValueError(
                f"model.magnifications: {type(self.pixels).__name__} has a class for each pixel of one image; leave it "
                "out"
            )
        inputs, outputs = self._copies(channels, cells), self.slide_outputs
        given = {"head": type(self.head) is not AveragePooling, "pool_over": self.pool_over != "slide"}
        for key, changed in given.items():
            if changed and not outputs:
                raise ValueError(
                    f"model.{key}: {type(self.pixels).__name__} has a class for each pixel and pools none; leave it "
                    "out, or add a target of the slide (model.targets)"
                )
        self.standardise = RunningStandardise(inputs) if outputs else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Conv2d(channels, self.pixels.outputs, 1)
        if outputs:
            self.slide_classifier = last_layer(self.head, inputs, outputs)

    @property
    def pixels(self) -> SegmentationTask:
        """The task of the class of each pixel."""
        return cast(SegmentationTask, self.task.pixels)

    @property
    def _drawn(self) -> str:
        """The name of the target of pixels."""
        return next(iter(self.task.by_target))

    def forward(self, image: Tensor, context: Sequence[Tensor] = (), tissue: Sequence[Tensor] = ()) -> Tensor:
        """The logits of each pixel, (1, outputs, height, width)."""
        if context:
            raise ValueError(f"model.magnifications is 1 and a slide has {1 + len(context)}")
        return self.at_pixels_and_pooled(image, tissue[0] if tissue else None)[0]

    def at_pixels_and_pooled(self, image: Tensor, tissue: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The logits of each pixel, enlarged between the positions of a backbone with a stride, and the pooled vector
        where there are targets of the slide too.
        """
        features = self._features(image, 0, tissue)
        logits: Tensor = self.classifier(self.dropout(features))
        if self.stride > 1:
            logits = functional.interpolate(logits, scale_factor=float(self.stride), mode="bilinear")
        vector = self._pooled(self.head, features, tissue) if self.slide_outputs else None
        return fitted(logits, image), vector

    def forward_head(self, vector: Tensor, covariates: Tensor | None = None) -> Tensor:
        """The logits of the slide, of the vector pooled beside the logits of pixels, and of the covariates."""
        return self.with_covariates(self.slide_classifier(self.dropout(self.standardise(vector))), covariates)

    def _recorded(self, batch: SlideBatch) -> tuple[Tensor, Tensor | None]:
        """The logits of each pixel and the pooled vector, lazy where the image is.

        The vector is looked at when the rest of the step is recorded: then one run makes both.
        """
        check_read(batch)
        tissue = batch.get("tissue", ())
        return self.at_pixels_and_pooled(batch["image"], tissue[0] if tissue else None)

    def _loss(self, batch: SlideBatch) -> Tensor:
        (logits, vector), targets = self._recorded(batch), self._targets(batch)
        loss = materialize(self.pixels.loss(logits, targets[self._drawn]))
        return self._total(loss, self._of_slide(vector, batch), targets)

    def _scored(self, batch: SlideBatch) -> tuple[Tensor, Tensor, Tensor]:
        (logits, vector), targets = self._recorded(batch), self._targets(batch)
        drawn = targets[self._drawn]
        lazy, areas = self.pixels.loss(logits, drawn), self.pixels.areas(logits, drawn)
        loss, of_slide = materialize(lazy), self._of_slide(vector, batch)
        row = loss.new_zeros(1) if of_slide is None else self.task.row(targets)
        return self._total(loss, of_slide, targets), row, self._joined(materialize(areas), of_slide)

    def predicted(self, batch: SlideBatch) -> Tensor:
        """The areas of pixels, or shares where no class of them is known, and the predictions of the slide."""
        (logits, vector), drawn = self._recorded(batch), self._targets(batch).get(self._drawn)
        found = materialize(self.pixels.predict(logits) if drawn is None else self.pixels.areas(logits, drawn))
        return self._joined(found, self._of_slide(vector, batch))

    def _of_slide(self, vector: Tensor | None, batch: SlideBatch) -> Tensor | None:
        """The logits of the slide as an ordinary tensor, where there is a vector."""
        return None if vector is None else self.forward_head(materialize(vector), batch.get("covariates"))

    def _total(self, of_pixels: Tensor, of_slide: Tensor | None, targets: Mapping[str, Tensor]) -> Tensor:
        """The loss of all targets."""
        loss = self.task.pixel_weight * of_pixels
        return loss if of_slide is None else loss + self.task.loss_of(of_slide, targets)

    def _joined(self, pixels: Tensor, of_slide: Tensor | None) -> Tensor:
        """The numbers of the pixels, and behind them the predictions of the slide."""
        if of_slide is None:
            return pixels
        return torch.cat([pixels, self.task.predict(of_slide.float()).to(pixels)], dim=1)


def _config_in(path: Path) -> ModelConfig:
    """The network in the config of a run, in which `fit` has written the name of each class in full."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(ModelConfig, "model")
    with nullcontext() if is_limited() else limited(trusted=False), as_written(path):
        try:
            options = parser.parse_object({"model": read_yaml(path)["model"]})
        except ArgumentError as error:
            named = denied(error)
            raise UserError(about("model", named) if named else f"{path}: {' '.join(str(error).split())}") from error
        check_backbone(options.model.backbone)
        config: ModelConfig = parser.instantiate(options).model
        return config


def make_model(config: ModelConfig) -> SlideModel:
    """The segmenter where a target is a class of each pixel, else the classifier."""
    first = config.task if config.targets is None else next(iter(config.targets.values()))
    return SlideSegmenter(config) if first is not None and first.dense else SlideClassifier(config)
