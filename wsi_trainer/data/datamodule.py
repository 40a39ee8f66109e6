"""Loaders of the three splits of a manifest: the order of an epoch, the place in it, and reading ahead."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_plugin import LazyImage
from wsi_trainer.data.covariates import Covariates
from wsi_trainer.data.dataset import DataConfig, SlideDataset, ToImage, Visit, as_it_is, dense, grouped, targets_of
from wsi_trainer.data.features import check_one_each
from wsi_trainer.data.manifest import SlideRecord, check_files
from wsi_trainer.data.splits import apply_splits, complete_splits
from wsi_trainer.errors import SlideError
from wsi_trainer.models.batch import SlideBatch
from wsi_trainer.models.tasks import MultiClassTask, Task
from wsi_trainer.slide.augment import Augmenter
from wsi_trainer.slide.views import View

log = logging.getLogger("wsi_trainer")


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
        places: bool = False,
        covariates: Covariates | None = None,
        sees_slide: bool = True,
    ) -> None:
        """Read the manifest and fix the splits.

        Args:
            config: Which slides.
            task: What is to be learnt, or just the names of the classes.
            seed: Decides the splits that the manifest leaves open, the order and the augmentation.
            to_image: Makes the image of the batch from a source: `dense` reads it, `LazyImage` only wraps it.
            tissue_stride: Pixels for one position of the map of tissue; without it a batch has none.
            kept: The slides of a run that has begun, with their splits; without them the manifest is read and split.
            places: Whether a batch has the places of patches.
            covariates: Columns that are shown beside each slide.
            sees_slide: Whether slides are opened.
        """
        super().__init__()
        self.config = config
        self.task = task.whole if isinstance(task, Task) else MultiClassTask(task)
        self.seed = seed
        self.to_image = to_image
        self.tissue_stride = tissue_stride
        self.kept = kept
        self.places = places
        records = kept or config.records(columns=self.task.columns, filled=not self.task.may_be_empty)
        targets = [targets_of(self.task, record) for record in records]
        if config.features is None:
            check_files(records)
        else:
            check_one_each(config.features, records)
        self.records = list(kept) if kept else self.split(records)
        self._loader: TrainLoader | None = None
        self._place: dict[str, Any] | None = None
        self.targets = {record.slide: own for record, own in zip(records, targets)}
        """By slide (and patient) the targets that are known, by name."""
        self.cases = grouped(config, self.records, self.task)
        """What batches are of, with their splits: `records`, or their patients."""
        self.targets |= {case.slide: self.targets[case.parts[0].slide] for case in self.cases if case.parts}
        self.covariates = (covariates or Covariates()).table(self.cases, config.absent_covariates)
        """By slide (or patient) the numbers of its covariates."""
        self.sees_slide = sees_slide

    def split(self, records: Sequence[SlideRecord]) -> list[SlideRecord]:
        """The records with a split for each, in the same order."""
        if self.config.splits is not None:
            records = apply_splits(records, self.config.splits, self.config.fold)
        done = complete_splits(
            stratified(self.task, records), self.config.validation, self.config.test, self.seed, self.config.split_by
        )
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

    def targets_of(self, split: str) -> dict[str, Tensor]:
        """The targets of the slides of a split by name, one row for each slide of which it is known."""
        slides = [self.targets[record.slide] for record in self.of(split)]
        known = {name: [own[name] for own in slides if name in own] for name in self.task.by_target}
        return {name: torch.cat(rows) for name, rows in known.items() if rows}

    def rows_of(self, records: Sequence[SlideRecord]) -> NDArray[np.float64]:
        """The targets of slides as the task's `predictions` takes them, one row for each slide."""
        return torch.cat([self.task.row(self.targets[record.slide]).double() for record in records]).numpy()

    def unknown(self) -> list[str]:
        """A line for each target that is not known of some slides."""
        count = {name: sum(name not in self.targets[one.slide] for one in self.cases) for name in self.task.by_target}
        return [
            f"the target {name} is not known of {number} of {len(self.cases)} slides"
            for name, number in count.items() if number
        ]  # fmt: skip

    def warn_of_lack(self, split: str) -> None:
        """Warn where scores that compare classes are not defined on a split."""
        if self.of(split) and (lack := self.task.lacking(self.targets_of(split))):
            log.warning("the split %s has %s: scores that compare slides are not defined there", split, lack)

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

    def _dataset(self, records: Sequence[SlideRecord], augmenter: Augmenter | None = None) -> SlideDataset:
        return SlideDataset(
            records, self.targets, self.config, self.to_image, augmenter, self.tissue_stride, self.task.legends,
            self.places, self.covariates, self.sees_slide,
        )  # fmt: skip

    def _rank(self) -> tuple[int, int]:
        """Rank of this process, and number of processes."""
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)


def stratified(task: Task, records: Sequence[SlideRecord]) -> list[SlideRecord]:
    """The records with the strata of their targets as labels, which splits and folds keep in proportion."""
    return [replace(one, label=task.stratum(one.cells), marks=task.marks(one.cells)) for one in records]


class EpochSampler(Sampler[Visit]):
    """All slides in a new order each epoch; with several ranks each has its share, of equal length.

    It counts the epochs itself. Lightning's `set_epoch` comes too late for the first epoch of a resumed run,
    which would then be drawn as epoch 0 again.

    With strata (the class of each slide) an epoch has as many visits as there are slides, and each class has its
    equal share of them: slides of a rare class are visited several times, of a frequent one only some are, and
    others in the next epoch.
    """

    def __init__(
        self, slides: int, seed: int, rank: int = 0, ranks: int = 1, strata: Sequence[str] | None = None
    ) -> None:
        if strata is not None and len(strata) != slides:
            raise ValueError(f"{len(strata)} strata for {slides} slides")
        self.slides = slides
        self.seed = seed
        self._classes = None if strata is None else _places(strata)
        self.rank, self.ranks = rank, ranks
        self.epoch = 0
        """The epoch that is drawn next."""
        self.skip = 0
        """How many visits of it were made before, by the run that this one continues."""

    def __len__(self) -> int:
        return -(-self.slides // self.ranks)

    def __iter__(self) -> Iterator[Visit]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        skip, self.skip = self.skip, 0
        order = self._order(epoch)
        # No rank may run out of slides before the others: they would wait for its gradients for ever.
        shared = np.resize(order, len(self) * self.ranks)[self.rank :: self.ranks]
        return (Visit(int(slide), epoch) for slide in shared[skip:])

    def _order(self, epoch: int) -> np.ndarray:
        """All visits of an epoch, a function of the seed and the epoch alone."""
        draw = np.random.default_rng((self.seed, epoch))
        if self._classes is None:
            return draw.permutation(self.slides)
        share, rest = divmod(self.slides, len(self._classes))
        visits = []
        for number, places in enumerate(self._classes):
            # What does not divide evenly goes to another class each epoch.
            wanted = share + ((number - epoch) % len(self._classes) < rest)
            rounds = [draw.permutation(places) for _ in range(-(-wanted // len(places)))]
            visits.append(np.concatenate(rounds)[:wanted] if rounds else places[:0])
        return draw.permutation(np.concatenate(visits))


def _places(strata: Sequence[str]) -> list[np.ndarray]:
    return [np.flatnonzero([stratum == name for stratum in strata]) for name in sorted(set(strata))]


class InOrder(Sampler[Visit]):
    """All slides in the order of the manifest, or a rank's share of them."""

    def __init__(self, slides: int, rank: int = 0, ranks: int = 1) -> None:
        self.places = range(rank, slides, ranks)

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[Visit]:
        return (Visit(slide, 0) for slide in self.places)


class TrainLoader(DataLoader[SlideBatch]):
    """A loader that a checkpoint can name a place in: the epoch, and how many of its slides were given out.

    The slide after the one that is given out is opened meanwhile. A slide that is held whole is not followed: one is
    what memory is for. What was opened ahead does not count: a continued run opens it again.
    """

    sampler: EpochSampler

    def __init__(self, dataset: Dataset[SlideBatch], sampler: EpochSampler, workers: int, ahead: bool = True) -> None:
        super().__init__(dataset, sampler=sampler, **_options(workers))
        self.place = {"epoch": sampler.epoch, "given": 0}
        self._ahead = ahead

    def __iter__(self) -> Iterator[SlideBatch]:  # type: ignore[override]
        self.place = {"epoch": self.sampler.epoch, "given": self.sampler.skip}
        batches = super().__iter__()
        with ThreadPoolExecutor(1, thread_name_prefix="opening") as opening:
            batch = next(batches, None)
            while batch is not None:
                views = views_of(batch)
                following: Future[SlideBatch | None] | None = None
                if self._ahead and (views or "failure" in batch):
                    following = opening.submit(next, batches, None)
                self.place["given"] += 1
                try:
                    yield batch
                    # An error of opening is raised here, where the slide's turn has come.
                    batch = next(batches, None) if following is None else following.result()
                finally:
                    for view in views:
                        view.close()

    def state_dict(self) -> dict[str, Any]:
        """Lightning puts it into every checkpoint."""
        return dict(self.place)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint was written, or with the next epoch where its own was over."""
        over = state["given"] >= len(self.sampler)
        self.sampler.epoch = state["epoch"] + over
        self.sampler.skip = 0 if over else state["given"]


def views_of(batch: SlideBatch) -> list[View]:
    """The views of slides in a batch."""
    images = [batch["image"], *batch.get("context", []), *batch["targets"].values()]
    sources = (image.source for image in images if isinstance(image, LazyImage))
    return [source for source in sources if isinstance(source, View)]


@contextmanager
def opened(batch: SlideBatch) -> Iterator[View]:
    """The view of a batch's slide, which is closed at the end; an error where it could not be opened."""
    if "failure" in batch:
        raise SlideError(batch["slide"], batch["failure"])
    try:
        yield batch["image"].source  # type: ignore[attr-defined]
    finally:
        for view in views_of(batch):
            view.close()


class OrderedLoader(DataLoader[SlideBatch]):
    """A loader that closes the slides of a batch when the next one is asked for, or none is asked for any more."""

    def __iter__(self) -> Iterator[SlideBatch]:  # type: ignore[override]
        for batch in super().__iter__():
            try:
                yield batch
            finally:
                for view in views_of(batch):
                    view.close()


def in_order(dataset: Dataset[SlideBatch], workers: int, rank: int = 0, ranks: int = 1) -> DataLoader[SlideBatch]:
    """A loader of the slides in the order given, not turned."""
    sampler: Sampler[Visit] = InOrder(len(dataset), rank, ranks)  # type: ignore[arg-type]
    return OrderedLoader(dataset, sampler=sampler, **_options(workers))


def _options(workers: int) -> dict[str, Any]:
    """Batches of one slide are not collated: a lazy image has no pixels to stack."""
    options: dict[str, Any] = {"multiprocessing_context": "spawn", "persistent_workers": True} if workers else {}
    # A generator of its own: an iterator draws a number when it is made, which a continued run makes anew.
    generator = torch.Generator()
    return {"batch_size": None, "num_workers": workers, "collate_fn": as_it_is, "generator": generator, **options}
