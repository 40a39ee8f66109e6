"""`SlideData`: the loaders of the three splits of a manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from wsi_trainer.data.dataset import DataConfig, SlideDataset, ToImage, dense, grouped, target_of
from wsi_trainer.data.features import check_one_each
from wsi_trainer.data.loader import EpochSampler, TrainLoader, in_order
from wsi_trainer.data.manifest import SlideRecord, check_files
from wsi_trainer.data.splits import apply_splits, complete_splits
from wsi_trainer.models.slide_model import SlideBatch
from wsi_trainer.models.tasks import MultiClassTask, Task
from wsi_trainer.slide.augment import Augmenter


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
        """Position in the epoch. Lightning asks the loader too, but gives its state back only to a loader that
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
        augmenter = Augmenter(self.seed, settings.flip_rotate, settings.shift, settings.stain, settings.tint)
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
        """Rank of this process, and number of processes."""
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)
