"""`Predictor`: a trained model that is asked about slides, without a Trainer and without writing anything."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_plugin import Box, BudgetError, LazyImage, PixelsError, TiledModule, make_plan, materialize
from lightning_plugin.memory import default_budget
from wsi_trainer.data.datamodule import in_order, opened, views_of
from wsi_trainer.data.dataset import DataConfig, SlideDataset, Visit, dense, grouped
from wsi_trainer.data.features import FeatureSource
from wsi_trainer.data.manifest import FEATURES, SlideRecord
from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.explain.attribution import Attribution, Method, attribute, index_of, targets_of
from wsi_trainer.explain.tables import PatchTable
from wsi_trainer.fit.config import AUTO, Loaded, TrainConfig, load
from wsi_trainer.fit.exported import Exported, write_exported
from wsi_trainer.fit.folder import RunFolder
from wsi_trainer.fit.plan import Step
from wsi_trainer.fit.trainer import device_of, engine_options, image_of, precision_of
from wsi_trainer.io.display import clean
from wsi_trainer.io.files import as_written
from wsi_trainer.metrics.decision import Decision, read_decisions
from wsi_trainer.models.backbones import FrozenFeatures
from wsi_trainer.models.batch import SlideBatch
from wsi_trainer.models.encoders import PatchEncoder
from wsi_trainer.models.hub import folder_of, push
from wsi_trainer.models.slide_model import SlideClassifier, SlideModel, forget
from wsi_trainer.models.tasks import Task
from wsi_trainer.slide.geometry import Pair
from wsi_trainer.slide.places import Places
from wsi_trainer.slide.views import Bag, Image, View

if TYPE_CHECKING:
    from pandas import DataFrame

DTYPES = {"64": torch.float64, "32": torch.float32, "16": torch.float16, "bf16": torch.bfloat16}
FILES_OF_FEATURES = tuple(Path(kind).suffix for kind in FEATURES)
BATCH = 64
"""Patches that are encoded at a time."""
CPU_BUDGET = "2GiB"
"""The budget of maps on a machine without an accelerator, where none is given."""
SPARE = 0.2
"""The share of an accelerator's free memory that maps leave alone without a budget."""
WHOLE = 4
"""A bag of features runs as plain PyTorch where that needs the budget's part of so many at most."""


@dataclass(frozen=True, eq=False)
class Attention:
    """The attention of a head, and where on the slide its positions lie."""

    weights: NDArray[np.float32]
    """Of each position; they add up to 1."""
    places: Places
    """Patches, or squares of an image: x and y of each in pixels of level 0 of the original slide, and their side."""

    def to_frame(self) -> DataFrame:
        """A table with a row for each position."""
        from wsi_trainer.notebook import weights_of

        return weights_of(self)


Opened = AbstractContextManager[tuple[SlideBatch, View]]
"""A slide as a batch on the device, whose images are lazy, and its view."""


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """Prediction of one slide; attention and features are computed when they are asked for."""

    slide: str
    """Its name."""
    names: tuple[str, ...]
    """The names of the numbers, as the columns of `wsi-train predict`."""
    values: NDArray[np.float64]
    """The numbers, in the same order."""
    _predictor: Predictor
    _opened: Callable[[], Opened]

    def __repr__(self) -> str:
        said = [f"{name} {value:.3g}" for name, value in self.to_dict().items()]
        if self._predictor.decisions is not None and self.decisions:
            said.append(f"decided for {', '.join(self.decisions.values())}")
        return f"Prediction of {clean(self.slide)}: {'; '.join(said)}"

    def to_dict(self) -> dict[str, float]:
        """The numbers by their names."""
        return dict(zip(self.names, map(float, self.values), strict=True))

    @cached_property
    def decisions(self) -> dict[str, str]:
        """By target, the class that is decided for, or the labels: at the threshold of the run, where it has one.

        Raises:
            UserError: The run has not chosen its threshold yet.
        """
        return self._predictor.decided(self.values)

    @property
    def decision(self) -> str:
        """The decision of the first target.

        Raises:
            UserError: It has no classes.
        """
        if not self.decisions:
            raise UserError(f"{', '.join(self.names)} is no class, and nothing is decided")
        return next(iter(self.decisions.values()))

    @cached_property
    def attention(self) -> Attention:
        """The attention of the head, for the class that maps are of by default.

        Raises:
            UserError: The head has none, or nobody knows where its positions lie.
        """
        with self._opened() as (batch, view):
            return self._predictor.attention(batch, view)

    @cached_property
    def features(self) -> NDArray[np.float32]:
        """The features that enter the head: (patches, width), or (channels, rows, columns) of a whole image."""
        with self._opened() as (batch, view):
            return self._predictor.features(batch, view)

    @cached_property
    def patches(self) -> PatchTable:
        """The patches with features, places, contribution and attention, for the class that maps are of by default:
        `patches.anndata()`, `patches.spatialdata()`.

        Raises:
            UserError: The model takes no patches, or nobody knows where they lie.
        """
        with self._opened() as (batch, view):
            return self._predictor.patches(batch, view, self.to_dict())


OnFailure = Callable[[str, str], None]
"""Told of a slide that cannot be read, and why."""


def columns_by(
    task: Task,
    decisions: Mapping[str, Decision],
    records: Sequence[SlideRecord],
    numbers: Sequence[NDArray[np.float64]],
) -> dict[str, list[Any]]:
    """The columns of a table of predictions: slide, patient, the numbers, and what each threshold decides for.

    Args:
        task: What is predicted.
        decisions: Of each target that has a threshold.
        records: The slides or patients.
        numbers: Those of each.
    """
    values = np.array(numbers).reshape(len(records), len(task.names))
    found: dict[str, list[Any]] = {"slide": [r.slide for r in records], "patient": [r.patient for r in records]}
    found |= dict(zip(task.names, values.T.tolist(), strict=True))
    for name, words in (task.decided(values, decisions) if decisions else {}).items():
        if name in decisions:
            found[f"decision_{name}" if len(task.by_target) > 1 else "decision"] = words
    return found


class Predictor:
    """A model in evaluation mode on its device, with one engine for all slides.

    >>> predictor = Predictor.open("runs/first")       # doctest: +SKIP
    >>> predictor.predict("slide.svs").to_dict()       # doctest: +SKIP
    {'probability_normal': 0.03, 'probability_tumour': 0.97}
    """

    def __init__(self, loaded: Loaded, origin: RunFolder | Exported | None = None) -> None:
        """Move the model to the device and precision that its config names.

        Args:
            loaded: The model with its settings.
            origin: What it comes from; without it slides are shown as they are.
        """
        self.loaded, self.origin = loaded, origin
        model, _, config = loaded
        self.device = device_of(config)
        if self.device.type == "cpu" and config.accelerator in ("cuda", "gpu"):
            raise UserError(f"train.accelerator is {config.accelerator}, and there is no such device; set it to auto")
        self._dtype, self.autocast = _dtypes(precision_of(config))
        """The type of autocast, where the precision is mixed."""
        model.eval().to(dtype=self._dtype)
        self._answers = Answer(model)
        self._network = _tiled(self._answers, config, self.device)
        self._questions: dict[tuple[Hashable, ...], nn.Module] = {}
        self._whole: dict[int, bool] = {}
        self._budget = self._network.engine.options.budget if isinstance(self._network, TiledModule) else None
        size = sum(parameter.nbytes for parameter in model.parameters())
        if self._budget is None or self.device.type == "cpu" or size < self._budget:
            model.to(self.device)
        else:  # plans stream its parameters
            for buffer in model.buffers():
                buffer.data = buffer.data.to(self.device)

    @classmethod
    def open(
        cls, path: str | Path, checkpoint: str = "best", overrides: Sequence[str] = (), trust: bool = False
    ) -> Self:
        """Open a model; a folder that may only be read is enough.

        Args:
            path: The folder of a run, a checkpoint in one, or a folder that `save_pretrained` wrote.
            checkpoint: Of a run best, last, or the path of another one.
            overrides: Keys of the config to change, such as `--train.budget=2GiB`.
            trust: Whether the config may name classes and functions beyond this package.
        """
        path = Path(path)
        origin: RunFolder | Exported
        if path.is_file():
            origin = RunFolder.of_checkpoint(path)._with(overrides=tuple(overrides))
        elif Exported.is_at(path):
            origin = Exported(path, tuple(overrides))
        else:
            origin = RunFolder.open(path, checkpoint, overrides=overrides)
        return cls(load(origin, trust), origin)

    # A folder of the model alone, and Hugging Face's hub.

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the model into a folder of its own, with its settings and a model card.

        Args:
            folder: The folder; a model that is there is replaced.
        """
        if self.origin is None:
            raise UserError("the model comes from no run, which says what its card tells")
        write_exported(Path(folder), self.loaded, self.origin, self._decisions)

    @classmethod
    def from_pretrained(
        cls, name: str | Path, *, overrides: Sequence[str] = (), trust: bool = False, **download: Any
    ) -> Self:
        """Open a model that `save_pretrained` wrote, or `push_to_hub`.

        Args:
            name: The folder; or the name on the hub, `user/model`, from where it is downloaded if it is not there.
            overrides: Keys of the config to change, such as `--train.budget=2GiB`.
            trust: Whether the config may name classes and functions beyond this package.
            download: Arguments of `huggingface_hub.snapshot_download`, such as `revision` or `local_files_only`.
        """
        return cls.open(folder_of(name, **download), overrides=overrides, trust=trust)

    def push_to_hub(self, name: str, **options: Any) -> str:
        """Upload the model with its card to Hugging Face's hub; returns the address.

        Args:
            name: The name there, `user/model`.
            options: Arguments of `huggingface_hub.ModelHubMixin.push_to_hub`, such as `private` or `token`.
        """
        return push(self.save_pretrained, name, **options)

    @property
    def model(self) -> SlideModel:
        """The model, in evaluation mode."""
        return self.loaded.model

    # Decisions.

    @property
    def decisions(self) -> dict[str, Decision] | None:
        """The decision of each target that has a threshold, by its name; None where that was not chosen yet."""
        rule = self.loaded.train.decision
        if (known := self.model.task.decisions_by(rule)) is not None or self.origin is None:
            return known
        with as_written(self.origin.decisions):
            return read_decisions(self.origin.decided, rule)

    @property
    def _decisions(self) -> dict[str, Decision]:
        if (known := self.decisions) is None:
            what = "the run" if self.origin is None else self.origin.path
            raise UserError(
                f"train.decision is {self.loaded.train.decision}, and {what} has no threshold by it yet, which "
                "`wsi-train validate` chooses on the validation slides; or give a number, --train.decision=0.5"
            )
        return known

    def decided(self, values: NDArray[np.float64]) -> dict[str, str]:
        """By target what is decided for, from the numbers of one slide."""
        return {name: words[0] for name, words in self.model.task.decided(values[None], self._decisions).items()}

    def columns(self, records: Sequence[SlideRecord], numbers: Sequence[NDArray[np.float64]]) -> dict[str, list[Any]]:
        """The columns of a table of predictions: slide, patient, the numbers, and what each threshold decides for.

        Args:
            records: The slides or patients.
            numbers: Those of each.
        """
        return columns_by(self.model.task, self._decisions, records, numbers)

    # Slides.

    def record_of(self, slide: str | Path, name: str | None = None) -> SlideRecord:
        """A slide without label, of the name of its file unless it is given another."""
        path = Path(slide)
        name = path.name if name is None else name
        if self.origin is None:
            return SlideRecord(name, path, "", name, "")
        return self.origin.record_of(path, name, self.model.covariates.names)

    def covariates_of(self, records: Sequence[SlideRecord], data: DataConfig | None = None) -> dict[str, Tensor]:
        """The numbers of the model's covariates, by slide or patient; empty where it has none.

        Raises:
            UserError: The manifest has no such column, or a cell is no number.
        """
        return self.model.covariates.table(records, (data or self.loaded.data).absent_covariates)

    # What is predicted.

    def predict(self, slide: str | Path, covariates: Mapping[str, object] | None = None) -> Prediction:
        """The prediction of one slide.

        Args:
            slide: Its file.
            covariates: The cells of `model.covariates` by their columns, None or empty where missing; without them
                those of the run's manifest, if it has the slide.

        Raises:
            SlideError: The slide cannot be read, whatever `data.on_error` says.
            UserError: The model takes other covariates.
        """
        record, data = self.record_of(slide), self.loaded.data
        if self._reads_features and Path(slide).suffix in FILES_OF_FEATURES:
            file = Path(slide)
            record = self.record_of(file.with_name(file.name.removesuffix(file.suffix)))
            data = replace(data, features=file.parent)
        elif self._reads_features and data.features is None:
            raise UserError(f"the model takes features of patches: give the file of a slide's features, not {slide}")
        if covariates is not None:
            record = replace(record, others={**record.others, **self.model.covariates.cells(covariates)})
        seen = None if self.origin is None else self.origin.seen
        (case,) = grouped(data, [record] if seen is None else seen.show([record], tell=False), None)
        batch = self._slides([case], None, data)[Visit(0, 0)]
        try:
            return self._answer(batch, partial(self.opened, case, data))
        finally:
            for view in views_of(batch):
                view.close()

    def predict_all(
        self,
        records: Sequence[SlideRecord],
        task: Task | None = None,
        workers: int = 0,
        failed: OnFailure | None = None,
    ) -> Iterator[Prediction]:
        """The predictions of slides, or of patients with `data.group`, one after the other.

        Args:
            records: The slides, as seen.
            task: Has the classes of drawn regions that a prediction is compared with pixel by pixel; without it none
                are read.
            workers: Processes that open slides ahead.
            failed: Is told of a slide that cannot be read, which is then left out; without it such a slide is an error.
        """
        data = self.loaded.data
        cases = grouped(data, records, None)
        for case, batch in zip(cases, in_order(self._slides(cases, task, data), workers), strict=True):
            try:
                prediction = self._answer(batch, partial(self.opened, case))
            except SlideError as error:
                if failed is None:
                    raise
                forget(error)
                failed(batch["slide"], error.reason)
                continue
            yield prediction

    @property
    def _reads_features(self) -> bool:
        return isinstance(self.model.backbone, FrozenFeatures)

    def _slides(self, cases: Sequence[SlideRecord], task: Task | None, data: DataConfig) -> SlideDataset:
        legends = {} if task is None else task.legends
        model, to_image = self.model, image_of(self.loaded.train)
        return SlideDataset(
            cases, None, data, to_image, None, model.tissue_stride, legends, model.wants_places,
            self.covariates_of(cases, data), model.sees_slide,
        )  # fmt: skip

    # Other questions: maps, and classes of pixels.

    @contextmanager
    def opened(self, record: SlideRecord, data: DataConfig | None = None) -> Iterator[tuple[SlideBatch, View]]:
        """A slide as a batch on the device, whose images are lazy, and its view, which is closed at the end.

        Args:
            record: The slide, as seen.
            data: How it is read, if otherwise than the slides of training.

        Raises:
            SlideError: The slide cannot be read.
        """
        stride = self.model.tissue_stride if isinstance(self.model, SlideClassifier) else None
        if not self.model.sees_slide:
            raise UserError("the model takes covariates alone and sees no slide: there is nothing to show on one")
        data, places = data or self.loaded.data, self.model.wants_places
        beside = self.covariates_of([record], data)
        slides = SlideDataset([record], None, data, LazyImage, None, stride, places=places, covariates=beside)
        batch = slides[Visit(0, 0)]
        with opened(batch) as view:
            yield _moved(batch, self.device), view

    def network(self, question: nn.Module, *kind: Hashable) -> nn.Module:
        """The network that answers a question, a module around the model, tile by tile; it is kept for further slides.

        Args:
            question: The module.
            kind: What tells it from other questions of its class.
        """
        name = (type(question), *kind)
        if name not in self._questions:
            self._questions[name] = TiledModule(question, budget=self._map_budget)
        return self._questions[name]

    @cached_property
    def _map_budget(self) -> int | str:
        """The config's budget where it names one, else most of what is free."""
        budget = self.loaded.train.budget
        if budget is not None and budget != AUTO:
            return budget
        if self.device.type != "cuda":
            return CPU_BUDGET
        return int(torch.cuda.mem_get_info(self.device)[0] * (1 - SPARE))

    def attribute(self, batch: SlideBatch, target: int, method: Method = "activation", steps: int = 16) -> Attribution:
        """The map of an opened slide for a class.

        Args:
            batch: The slide.
            target: Index of the class.
            method: What a position's value is; see `wsi_trainer.explain.attribution.attribute`.
            steps: Steps from background to the slide, of `integrated`.
        """
        model = self.model
        if not isinstance(model, SlideClassifier):
            raise UserError(
                f"a map is for one prediction of a slide, and {type(model.task).__name__} has one of pixels"
            )
        image = self._whole_of(batch)
        return attribute(
            model, batch["image"] if image is None else image.to(self.device), target, method,
            context=batch.get("context", ()), tissue=batch.get("tissue", ()), places=batch.get("places"),
            covariates=batch.get("covariates"), steps=steps,
            network=self.network if image is None else None,
        )  # fmt: skip

    def attention(self, batch: SlideBatch, view: View, target: str | None = None) -> Attention:
        """The attention of the head over an opened slide.

        Args:
            batch: The slide.
            view: Its view.
            target: The class, of a head with attention for each; by default the one that maps are of.
        """
        found = self.attribute(batch, index_of(self.model.task, target), "attention")
        places = places_of(view, self.model.stride, tuple(found.values.shape))
        return Attention(found.values.float().flatten().cpu().numpy(), places)

    def features(self, batch: SlideBatch, view: View) -> NDArray[np.float32]:
        """The features of an opened slide that enter the head, at the finest magnification."""
        if self._reads_features:
            return dense(view)[0, :, :, 0].t().numpy()
        if isinstance(self.model.backbone, PatchEncoder):
            count, _, size, _ = view.shape
            boxes = (Box((at, 0, 0), (min(at + BATCH, count), size, size)) for at in range(0, count, BATCH))
            return np.concatenate([self.encode(view.read(box)) for box in boxes])
        with self._precision(), torch.no_grad():
            found = materialize(self.network(FeatureMap(self.model))(batch["image"], batch.get("tissue", ())))
        return found[0].float().cpu().numpy()

    def patches(
        self, batch: SlideBatch, view: View, prediction: Mapping[str, float], target: str | None = None,
        mpp: Pair | None = None,
    ) -> PatchTable:  # fmt: skip
        """The patches of an opened slide as a table.

        Args:
            batch: The slide.
            view: Its view.
            prediction: The numbers predicted of it.
            target: The class that contribution and attention speak for; by default the one that maps are of.
            mpp: Micrometres per pixel of its level 0, y and x, where a file of features does not say them.
        """
        model = self.model
        if not isinstance(view, Bag | FeatureSource):
            raise UserError(
                f"a table is of patches, and model.backbone is {type(model.backbone).__name__}, which takes images; "
                "`wsi-train heatmap` writes its maps"
            )
        mpp = view.place.mpp if isinstance(view, Bag) else mpp
        place = index_of(model.task, target)
        numbers = {"contribution": self.attribute(batch, place).values.flatten().float().cpu().numpy()}
        if model.head.attends:
            numbers["attention"] = self.attention(batch, view, target).weights
        return PatchTable(
            slide=batch["slide"], places=view.places.in_pixels(mpp), mpp=mpp, features=self.features(batch, view),
            numbers=numbers, prediction=prediction, target=targets_of(model.task)[place],
            model=type(model).__name__ if self.origin is None else self.origin.path.resolve().name,
        )  # fmt: skip

    def encode(self, patches: Tensor) -> NDArray[np.float32]:
        """The features of some patches, a row for each.

        Args:
            patches: Their pixels, (patches, 3, size, size).
        """
        encoder = self.model.backbone
        if not isinstance(encoder, PatchEncoder):
            raise UserError(f"model.backbone is {type(encoder).__name__}, which encodes no patches; use PatchEncoder")
        encoder.to(self.device)  # where plans stream parameters it is not there
        with self._precision(), torch.inference_mode():
            features = encoder.vectors(self.model.normalise(patches.to(self.device)))
        return features.float().cpu().numpy()

    # How.

    def _answer(self, batch: SlideBatch, again: Callable[[], Opened]) -> Prediction:
        network: nn.Module = self._network
        if (image := self._whole_of(batch)) is not None:
            network, batch = self._answers, {**batch, "image": image}
        with self._precision(), torch.no_grad():
            values: Tensor = network(_moved(batch, self.device))
        return Prediction(batch["slide"], self.model.task.names, values[0].double().cpu().numpy(), self, again)

    def _whole_of(self, batch: SlideBatch) -> Tensor | None:
        """A bag of features that plain PyTorch runs whole; None of anything else."""
        image = batch["image"]
        fits = self._reads_features and isinstance(image, LazyImage) and self._fits_whole(image.shape[2])
        return dense(image.source) if fits and isinstance(image, LazyImage) else None

    def _fits_whole(self, patches: int) -> bool:
        """True for a bag of features of which plain PyTorch needs a small part of the budget.

        It is asked of the next power of two, so that few lengths are planned.
        """
        patches = 1 << (patches - 1).bit_length()
        if patches not in self._whole:
            self._whole[patches] = (
                self._budget is None or self._plain_bytes(patches, self._budget) * WHOLE <= self._budget
            )
        return self._whole[patches]

    def _plain_bytes(self, patches: int, budget: int) -> float:
        """Bytes that plain PyTorch needs for a bag of features; infinite where nobody knows, or no plan fits."""
        backbone = self.model.backbone
        assert isinstance(backbone, FrozenFeatures)
        shape = (1, backbone.out_channels, patches, 1)
        with self._precision(), torch.no_grad():
            try:
                return make_plan(Step(self.model, ()), shape, budget=budget, device=self.device.type).plain_bytes
            except (BudgetError, PixelsError):
                return float("inf")

    @contextmanager
    def _precision(self) -> Iterator[None]:
        """The default type of new tensors, and autocast, as the Trainer sets them."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            with nullcontext() if self.autocast is None else torch.autocast(self.device.type, self.autocast):
                yield
        finally:
            torch.set_default_dtype(before)


class Answer(nn.Module):
    """The prediction of a batch."""

    def __init__(self, model: SlideModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: SlideBatch) -> Tensor:
        return self.model.predicted(batch)


class FeatureMap(nn.Module):
    """The map of features of an image."""

    def __init__(self, model: SlideModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor, tissue: Sequence[Tensor]) -> Tensor:
        return self.model._features(image, 0, tissue[0] if tissue else None)


def places_of(view: View, stride: int, shape: tuple[int, ...]) -> Places:
    """Places of the positions that a head sees of a slide.

    Args:
        view: The slide.
        stride: Pixels of an image for one position.
        shape: Rows and columns of the map of an image, which may end before the image does.

    Raises:
        UserError: They lie on several slides, or a file of features does not say it.
    """
    if isinstance(view, Bag | FeatureSource):
        return view.places
    if not isinstance(view, Image):
        raise UserError("attention is of one slide, and data.group is patient; --data.group=slide asks for each slide")
    rows, columns = shape
    grid = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), axis=-1).reshape(-1, 2)
    place = view.place.coarser(stride)
    return Places(view.slide.path, place.to_slide(grid), side=sum(place.scale) / 2, slide=place.shape)


def _tiled(answers: nn.Module, config: TrainConfig, device: torch.device) -> nn.Module:
    """A module tile by tile where the config has a budget, with the config's options of the engine."""
    if config.budget is None:
        return answers
    budget = default_budget(device) if config.budget == AUTO else config.budget
    try:
        return TiledModule(answers, budget=budget, **engine_options(config))
    except (ValueError, OverflowError) as error:
        raise UserError(f"train.budget: {error}") from error


def _moved(batch: SlideBatch, device: torch.device) -> SlideBatch:
    moved: dict[str, Any] = {
        key: [one.to(device) for one in value] for key, value in batch.items() if isinstance(value, list)
    }
    targets = {name: target.to(device) for name, target in batch["targets"].items()}
    moved |= {key: batch[key].to(device) for key in ("places", "covariates") if key in batch}
    return {**batch, **moved, "image": batch["image"].to(device), "targets": targets}  # type: ignore[typeddict-item]


def _dtypes(precision: str) -> tuple[torch.dtype, torch.dtype | None]:
    """The type of parameters, and that of autocast where the precision is mixed."""
    bits, _, how = precision.partition("-")
    if bits not in DTYPES or how not in ("true", "mixed"):
        raise UserError(f"train.precision is {precision!r}; a prediction needs 32-true, 64-true, bf16-mixed or alike")
    return (torch.float32, DTYPES[bits]) if how == "mixed" else (DTYPES[bits], None)
