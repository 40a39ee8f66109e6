"""From the manifest to batches of one slide."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_plugin import LazyImage, TileSource
from wsi_trainer.data.features import FeatureSource, check_one_each, features_of
from wsi_trainer.data.images import dense, readers_of
from wsi_trainer.data.joined import Joined
from wsi_trainer.data.loader import TrainLoader, in_order
from wsi_trainer.data.manifest import SlideRecord, check_files, read_manifest
from wsi_trainer.data.patches.bag import augmented, augmenter_of, open_bag
from wsi_trainer.data.patches.config import PatchConfig
from wsi_trainer.data.patients import by_patient
from wsi_trainer.data.published_splits import apply_splits
from wsi_trainer.data.sampling import EpochSampler, Visit
from wsi_trainer.data.splits import By, complete_splits
from wsi_trainer.data.tissue import TissueMap, tissue_of
from wsi_trainer.errors import UserError
from wsi_trainer.models.batch import SlideBatch
from wsi_trainer.models.tasks import MultiClassTask, SegmentationTask, Task
from wsi_trainer.regions import open_target
from wsi_trainer.slide.augment import AS_IT_IS, Augmentation, Augmented, Augmenter
from wsi_trainer.slide.slide import Slide
from wsi_trainer.slide.tissue import TissueMask
from wsi_trainer.slide.views import Image, View

ToImage = Callable[[TileSource], Tensor]
MASKS = 64 << 20
"""Bytes of tissue masks that a process keeps."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which slides, and how they are read."""

    manifest: Path
    """CSV file with the columns slide, those of the task (label, unless it says otherwise), and optionally patient,
    split and site.
    """
    root: Path | None = None
    """Folder at which relative paths of slides start; by default the manifest's."""
    stores: Path | None = None
    """Folder that `wsi-train preprocess` wrote: slides of the manifest are read from their stores there, which are
    found by the slides' names. Null reads the files that the manifest lists.
    """
    downsample: int = 1
    """Shrink the slide by this factor in each direction: 1 trains on every pixel, 16 on a thumbnail."""
    context: tuple[int, ...] = ()
    """Further magnifications of each slide, as factors by which it is shrunk, such as [4, 16]; `model.levels` is then
    one more than they are.
    """
    patches: PatchConfig | None = None
    """Show the network each slide as a bag of patches, which `model.backbone` PatchEncoder encodes one by one; null
    shows it the image whole.
    """
    features: Path | None = None
    """Folder with the features of each slide's patches, to train a head on these: SLIDE.h5 (`wsi-train embed`, TRIDENT,
    CLAM, STAMP) or SLIDE.pt (CLAM); `model.backbone` is then FrozenFeatures, and the slides themselves may be absent.
    """
    group: Literal["slide", "patient"] = "slide"
    """What one step sees and one prediction is of: a slide, or all slides of a patient as one bag (`data.patches` or
    `data.features`); they have one label.
    """
    validation: float = 0.2
    """Share of the patients that choose the checkpoint, where the manifest has no split val."""
    test: float = 0.2
    """Share of the patients that are held out, where the manifest has no splits."""
    split_by: By = "patient"
    """What the splits that the manifest leaves open never divide: a patient, or a whole site, so that the model is
    judged on sites that it was not trained on.
    """
    splits: Path | None = None
    """File with the split of each slide that others published, instead of the manifest's: CLAM's splits_0.csv, or a
    table of Patho-Bench (k=all.tsv). A patient in two splits is refused.
    """
    fold: int = 0
    """Which fold of `splits`, where the file has several."""
    balance: bool = False
    """Whether each class has its equal share of an epoch's visits, however rare it is."""
    turn: bool = True
    """Show each slide in one of its eight orientations in training."""
    shift: int = 0
    """Shift each slide by up to this many pixels in training."""
    stain: float = 0.0
    """Change the amount of each stain by up to this share in training, such as 0.1."""
    tint: float = 0.0
    """Shift each colour by up to this optical density in training, such as 0.03."""
    workers: int = 0
    """Processes that open slides ahead of the training step."""
    readers: int | None = None
    """Threads that read and decode each slide beside the step; null takes 2 where processors compute, which decode many
    times faster than a network computes, and with a GPU all processors but one, at most 8.
    """
    ahead: bool = True
    """Augment tiles beside the step, and read the first of the next slide while this one runs backward, where the
    budget has room for them: no result depends on it.
    """
    on_error: Literal["stop", "skip"] = "stop"
    """What a slide that cannot be read does: end the run, or be left out; the latter is written to failures.csv."""

    def __post_init__(self) -> None:
        if self.downsample < 1:
            raise UserError(f"data.downsample is {self.downsample}; it must be 1 or more")
        if any(factor <= self.downsample for factor in self.context) or list(self.context) != sorted(set(self.context)):
            raise UserError(
                f"data.context is {list(self.context)}; give rising factors above data.downsample, {self.downsample}"
            )
        if self.patches is not None and (self.downsample != 1 or self.context):
            key = "downsample" if self.downsample != 1 else "context"
            raise UserError(f"data.{key} is for whole images; with data.patches say data.patches.mpp, and leave it out")
        if self.features is not None:
            for key, given in (
                ("patches", self.patches is not None),
                ("downsample", self.downsample != 1),
                ("context", self.context),
            ):
                if given:
                    raise UserError(
                        f"data.{key} is for slides, and data.features reads what was made of them; leave it out"
                    )
            if not self.features.is_dir():
                raise UserError(f"data.features is {self.features}; there is no such folder")
        if self.group == "patient" and self.patches is None and self.features is None:
            raise UserError(
                "data.group is patient, which joins bags: give data.patches or data.features; images of several slides "
                "are not one image"
            )
        if self.splits is not None and not self.splits.is_file():
            raise UserError(f"data.splits is {self.splits}; there is no such file")
        if self.readers is not None and self.readers < 1:
            raise UserError(f"data.readers is {self.readers}; it must be 1 or more, or null")
        for name in ("workers", "shift", "stain", "tint", "fold"):
            if getattr(self, name) < 0:
                raise UserError(f"data.{name} is {getattr(self, name)}; it must be 0 or more")
        for name, share in (("validation", self.validation), ("test", self.test)):
            if not 0 <= share < 1:
                raise UserError(f"data.{name} is {share}; it must be at least 0 and below 1")

    def records(self, manifest: Path | None = None, **how: Any) -> list[SlideRecord]:
        """The slides of the manifest, or of another one, as they are read in training: `read_manifest` says how."""
        stores = None if self.features is not None else self.stores
        return read_manifest(manifest or self.manifest, self.root, stores=stores, **how)


class SlideDataset(Dataset[SlideBatch]):
    """Slides by their place in the manifest, each a batch of one."""

    def __init__(
        self,
        records: Sequence[SlideRecord],
        task: Task | None,
        config: DataConfig,
        to_image: ToImage,
        augmenter: Augmenter | None = None,
        tissue_stride: int | None = None,
    ) -> None:
        """Keep what is needed to open a slide.

        Args:
            records: The slides.
            task: Makes the target; None where slides have no label, which is then -1.
            config: How slides are read.
            to_image: Makes the image of the batch from a source.
            augmenter: Draws how a slide is shown in an epoch; without it slides are shown as they are.
            tissue_stride: Pixels for one position of the map of tissue; without it a batch has none.
        """
        self.records = list(records)
        self.task = task
        self.config = config
        self.to_image = to_image
        self.augmenter = augmenter
        self.tissue_stride = tissue_stride
        self.readers = readers_of(config.readers)
        self._masks: OrderedDict[tuple[Path, tuple[float, float]], TissueMask] = OrderedDict()

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, visit: Visit) -> SlideBatch:
        record = self.records[visit.slide]
        label = torch.tensor([-1]) if self.task is None else target_of(self.task, record)
        batch = SlideBatch(image=torch.empty(0), label=label, slide=record.slide)
        try:
            if self.config.patches is None and self.config.features is None:
                self._open(batch, record, visit)
            else:
                parts = [self._part(part, visit) for part in record.parts or (record,)]
                batch["image"] = self._image(Joined(parts) if record.parts else parts[0])
        except (UserError, OSError) as error:
            # The step says so: here, perhaps in another process, nobody knows whether the run may go on.
            # Of a patient's slides it is the error that names the one.
            batch["failure"] = str(error) if record.parts else getattr(error, "reason", str(error))
        return batch

    def _open(self, batch: SlideBatch, record: SlideRecord, visit: Visit) -> None:
        factors = [self.config.downsample, *self.config.context]
        slide = Slide.open(record.path, mpp=record.mpp, name=record.slide)
        images = [Image(slide, factor=factor * record.shrink, threads=self.readers) for factor in factors]
        how = AS_IT_IS if self.augmenter is None else self.augmenter.draw(record.slide, visit.epoch)
        shown = [_coarser(how, factor / factors[0]) for factor in factors]
        batch["image"], *context = [self._image(_shown(image, how)) for image, how in zip(images, shown)]
        if isinstance(self.task, SegmentationTask):
            drawn = Augmented(drawn_on(record, images[0], self.task), replace(shown[0], stain=None), name=record.slide)
            if self.task.beside is not None:
                batch["beside"] = batch["label"]
            batch["label"] = self._image(drawn)
        if context:
            batch["context"] = context
        if self.tissue_stride is not None:
            masks = [self._kept(image, tissue_of) for image in images]
            batch["tissue"] = [
                self.to_image(TissueMap(mask, image.size, self.tissue_stride, replace(how, stain=None)))
                for mask, image, how in zip(masks, images, shown)
            ]

    def _image(self, view: View) -> Tensor:
        view.reads_ahead = self.config.ahead
        image = self.to_image(view)
        if not isinstance(image, LazyImage):  # it was read whole
            view.close()
        return image

    def _part(self, record: SlideRecord, visit: Visit) -> View:
        """The features of a slide's patches, or the patches."""
        if self.config.features is not None:
            return FeatureSource(features_of(self.config.features, record.path), record.slide)
        assert self.config.patches is not None
        return self._bag(record, visit, self.config.patches)

    def _bag(self, record: SlideRecord, visit: Visit, patches: PatchConfig) -> View:
        """The patches of a slide, as they are shown in an epoch."""
        tissue = partial(self._kept, find=Image.tissue)
        bag = open_bag(record.path, patches, tissue, record.mpp, self.readers, record.slide, record.shrink)
        if self.augmenter is None:
            return bag
        each = augmenter_of(patches, self.augmenter.seed).draw(record.slide, visit.epoch, bag.shape[0])
        return augmented(bag, self.augmenter.draw(record.slide, visit.epoch), each)

    def _kept(self, image: Image, find: Callable[[Image], TissueMask]) -> TissueMask:
        """A mask, which is the same in every epoch; those that were used last are kept, up to `MASKS` bytes."""
        key = image.slide.path, image.image.scale
        if key not in self._masks:
            self._masks[key] = find(image)
            while len(self._masks) > 1 and sum(kept.mask.nbytes for kept in self._masks.values()) > MASKS:
                self._masks.popitem(last=False)
        self._masks.move_to_end(key)
        return self._masks[key]


def drawn_on(record: SlideRecord, image: Image, task: SegmentationTask) -> TileSource:
    """The class of each pixel of a slide's image, as it was drawn."""
    path = Path(drawn) if (drawn := record.others.get("regions")) else None
    return open_target(path, task.legend, record.path, (image.shape[2], image.shape[3]), image.place)


def _shown(image: Image, how: Augmentation) -> View:
    return image if how == AS_IT_IS else Augmented(image, how)


def _coarser(how: Augmentation, times: float) -> Augmentation:
    """The same augmentation on an image with fewer pixels."""
    down, right = how.shift
    return replace(how, shift=(round(down / times), round(right / times)))


def grouped(config: DataConfig, records: Sequence[SlideRecord], task: Task | None) -> list[SlideRecord]:
    """What batches are of: slides, or patients; without a task they need no labels."""
    if config.group == "slide":
        return list(records)
    return by_patient(records, () if task is None else task.columns)


def target_of(task: Task, record: SlideRecord) -> Tensor:
    """The target of a slide; an error names the slide and the cell."""
    try:
        return task.target(record.cells)
    except UserError as error:
        raise UserError(f"slide {record.slide} {error}") from error


class SlideData(pl.LightningDataModule):
    """The loaders of the three splits. Batches hold one slide, since slides differ in size."""

    def __init__(
        self,
        config: DataConfig,
        task: Task | Sequence[str],
        seed: int = 0,
        to_image: ToImage = dense,
        tissue_stride: int | None = None,
        kept: Sequence[SlideRecord] | None = None,
    ) -> None:
        """Read the manifest and fix the splits.

        Args:
            config: Which slides.
            task: What is to be learnt, or just the names of the classes.
            seed: Decides the splits that the manifest leaves open, the order and the augmentation.
            to_image: Makes the image of the batch from a source: `dense` reads it, `LazyImage` only wraps it.
            tissue_stride: Pixels for one position of the map of tissue; without it a batch has none.
            kept: The slides of a run that has begun, with their splits; without them the manifest is read and split.
        """
        super().__init__()
        self.config = config
        self.task = task if isinstance(task, Task) else MultiClassTask(task)
        self.seed = seed
        self.to_image = to_image
        self.tissue_stride = tissue_stride
        self.kept = kept
        records = kept or config.records(columns=self.task.columns, filled=not self.task.may_be_empty)
        targets = [target_of(self.task, record) for record in records]
        if config.features is None:
            check_files(records)
        else:
            check_one_each(config.features, (record.path for record in records))
        self.records = list(kept) if kept else self.split(records)
        self._loader: TrainLoader | None = None
        self._place: dict[str, Any] | None = None
        self.targets = {record.slide: target for record, target in zip(records, targets)}
        self.cases = grouped(config, self.records, self.task)
        """What batches are of, with their splits: `records`, or their patients."""
        self.targets |= {case.slide: self.targets[case.parts[0].slide] for case in self.cases if case.parts}

    def split(self, records: Sequence[SlideRecord]) -> list[SlideRecord]:
        """The records with a split for each, in the same order."""
        if self.config.splits is not None:
            records = apply_splits(records, self.config.splits, self.config.fold)
        strata = [
            replace(record, label=self.task.stratum(record.cells), marks=self.task.marks(record.cells))
            for record in records
        ]
        done = complete_splits(strata, self.config.validation, self.config.test, self.seed, self.config.split_by)
        return [replace(record, split=other.split) for record, other in zip(records, done)]

    def state_dict(self) -> dict[str, Any]:
        """Where in an epoch the run is. Lightning asks the loader too, but gives its state back only to a loader that
        was not made before, and making a schedule of the learning rate makes it.
        """
        return {} if self._loader is None else self._loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._place = state_dict or None

    def of(self, split: str) -> list[SlideRecord]:
        """The slides (or patients, by `data.group`) of a split, in the order of the manifest."""
        return [case for case in self.cases if case.split == split]

    def targets_of(self, split: str) -> Tensor:
        """The targets of the slides of a split, one row for each."""
        return torch.cat([self.targets[record.slide] for record in self.of(split)])

    def train_dataloader(self) -> DataLoader[SlideBatch]:
        settings, records = self.config, self.of("train")
        augmenter = Augmenter(self.seed, settings.turn, settings.shift, settings.stain, settings.tint)
        strata = [self.task.stratum(record.cells) for record in records] if settings.balance else None
        sampler = EpochSampler(len(records), self.seed, *self._rank(), strata)
        self._loader = TrainLoader(self._dataset(records, augmenter), sampler, settings.workers, settings.ahead)
        if self._place is not None:
            self._loader.load_state_dict(self._place)
        return self._loader

    def val_dataloader(self) -> DataLoader[SlideBatch]:
        return in_order(self._dataset(self.of("val")), self.config.workers, *self._rank())

    def test_dataloader(self) -> DataLoader[SlideBatch]:
        return self.loader("test")

    def loader(self, split: str) -> DataLoader[SlideBatch]:
        """The slides of a split in order and not turned, for evaluation."""
        return in_order(self._dataset(self.of(split)), self.config.workers)

    def _dataset(self, records: Sequence[SlideRecord], augmenter: Augmenter | None = None) -> SlideDataset:
        return SlideDataset(records, self.task, self.config, self.to_image, augmenter, self.tissue_stride)

    def _rank(self) -> tuple[int, int]:
        """Which of how many processes this one is."""
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)
