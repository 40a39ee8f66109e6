"""From the manifest to batches of one slide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_plugin import TileSource
from wsi_trainer.data.images import dense, open_image
from wsi_trainer.data.manifest import SlideRecord, check_files, check_labels, read_manifest
from wsi_trainer.data.sampling import EpochSampler, InOrder, Visit
from wsi_trainer.data.splits import complete_splits
from wsi_trainer.errors import UserError
from wsi_trainer.models.classifier import SlideBatch
from wsi_trainer.slides.augment import AugmentedSource, Augmenter

ToImage = Callable[[TileSource], Tensor]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which slides, and how they are read."""

    manifest: Path
    """CSV file with the columns slide, label, and optionally patient, split and site."""
    root: Path | None = None
    """Folder at which relative paths of slides start; by default the manifest's."""
    downsample: int = 1
    """Shrink the slide by this factor in each direction: 1 trains on every pixel, 16 on a thumbnail."""
    validation: float = 0.2
    """Share of the patients that choose the checkpoint, where the manifest has no split val."""
    test: float = 0.2
    """Share of the patients that are held out, where the manifest has no splits."""
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

    def __post_init__(self) -> None:
        if self.downsample < 1:
            raise UserError(f"data.downsample is {self.downsample}; it must be 1 or more")
        for name, share in (("validation", self.validation), ("test", self.test)):
            if not 0 <= share < 1:
                raise UserError(f"data.{name} is {share}; it must be at least 0 and below 1")


class SlideDataset(Dataset[SlideBatch]):
    """Slides by their place in the manifest, each a batch of one."""

    def __init__(
        self,
        records: Sequence[SlideRecord],
        classes: Sequence[str] | None,
        downsample: int,
        to_image: ToImage,
        augmenter: Augmenter | None = None,
    ) -> None:
        """Keep what is needed to open a slide.

        Args:
            records: The slides.
            classes: The labels in the order of the task; None where slides have no label, which is then -1.
            downsample: How much each slide is shrunk.
            to_image: Makes the image of the batch from a source.
            augmenter: Draws how a slide is shown in an epoch; without it slides are shown as they are.
        """
        self.records = list(records)
        self.classes = None if classes is None else list(classes)
        self.downsample = downsample
        self.to_image = to_image
        self.augmenter = augmenter

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, visit: Visit) -> SlideBatch:
        record = self.records[visit.slide]
        source: TileSource = open_image(record.path, self.downsample)
        if self.augmenter is not None:
            source = AugmentedSource(source, self.augmenter.draw(record.slide, visit.epoch))
        label = -1 if self.classes is None else self.classes.index(record.label)
        return SlideBatch(image=self.to_image(source), label=torch.tensor([label]), slide=record.slide)


class SlideData(pl.LightningDataModule):
    """The loaders of the three splits. Batches hold one slide, since slides differ in size."""

    def __init__(self, config: DataConfig, classes: Sequence[str], seed: int = 0, to_image: ToImage = dense) -> None:
        """Read the manifest and fix the splits.

        Args:
            config: Which slides.
            classes: The labels in the order of the task.
            seed: Decides the splits that the manifest leaves open, the order and the augmentation.
            to_image: Makes the image of the batch from a source: `dense` reads it, `LazyImage` only wraps it.
        """
        super().__init__()
        self.config = config
        self.classes = tuple(classes)
        self.seed = seed
        self.to_image = to_image
        records = read_manifest(config.manifest, config.root)
        check_labels(records, classes)
        check_files(records)
        self.records = complete_splits(records, config.validation, config.test, seed)
        self.sampler = EpochSampler(len(self.of("train")), seed)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.sampler.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.sampler.epoch = state_dict["epoch"]

    def of(self, split: str) -> list[SlideRecord]:
        """The slides of a split, in the order of the manifest."""
        return [record for record in self.records if record.split == split]

    def train_dataloader(self) -> DataLoader[SlideBatch]:
        settings = self.config
        augmenter = Augmenter(self.seed, settings.turn, settings.shift, settings.stain, settings.tint)
        return make_loader(self._dataset(self.of("train"), augmenter), self.sampler, settings.workers)

    def val_dataloader(self) -> DataLoader[SlideBatch]:
        return self.loader("val")

    def test_dataloader(self) -> DataLoader[SlideBatch]:
        return self.loader("test")

    def loader(self, split: str) -> DataLoader[SlideBatch]:
        """The slides of a split in order and not turned, for evaluation."""
        return in_order(self._dataset(self.of(split)), self.config.workers)

    def _dataset(self, records: Sequence[SlideRecord], augmenter: Augmenter | None = None) -> SlideDataset:
        return SlideDataset(records, self.classes, self.config.downsample, self.to_image, augmenter)


def in_order(dataset: SlideDataset, workers: int) -> DataLoader[SlideBatch]:
    """A loader of the slides in the order given, not turned."""
    return make_loader(dataset, InOrder(len(dataset)), workers)


def make_loader(dataset: SlideDataset, sampler: Sampler[Visit], workers: int) -> DataLoader[SlideBatch]:
    """A loader of batches of one slide, which are not collated: a lazy image has no pixels to stack."""
    options: dict[str, Any] = {"multiprocessing_context": "spawn", "persistent_workers": True} if workers else {}
    return DataLoader(dataset, batch_size=None, sampler=sampler, num_workers=workers, collate_fn=_as_it_is, **options)


def _as_it_is(batch: Any) -> Any:
    return batch
