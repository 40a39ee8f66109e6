"""Loaders of batches of one slide, and where in an epoch one of them is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from wsi_trainer.data.sampling import EpochSampler, InOrder, Visit
from wsi_trainer.models.batch import SlideBatch


class TrainLoader(DataLoader[SlideBatch]):
    """A loader that a checkpoint can name a place in: the epoch, and how many of its slides were given out.

    What worker processes have opened ahead does not count: a continued run opens it again.
    """

    sampler: EpochSampler

    def __init__(self, dataset: Dataset[SlideBatch], sampler: EpochSampler, workers: int) -> None:
        super().__init__(dataset, sampler=sampler, **_options(workers))
        self.place = {"epoch": sampler.epoch, "given": 0}

    def __iter__(self) -> Iterator[SlideBatch]:  # type: ignore[override]
        self.place = {"epoch": self.sampler.epoch, "given": self.sampler.skip}
        for batch in super().__iter__():
            self.place["given"] += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Lightning puts it into every checkpoint."""
        return dict(self.place)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint was written, or with the next epoch where its own was over."""
        over = state["given"] >= len(self.sampler)
        self.sampler.epoch = state["epoch"] + over
        self.sampler.skip = 0 if over else state["given"]


def in_order(dataset: Dataset[SlideBatch], workers: int, rank: int = 0, ranks: int = 1) -> DataLoader[SlideBatch]:
    """A loader of the slides in the order given, not turned."""
    sampler: Sampler[Visit] = InOrder(len(dataset), rank, ranks)  # type: ignore[arg-type]
    return DataLoader(dataset, sampler=sampler, **_options(workers))


def _options(workers: int) -> dict[str, Any]:
    """Batches of one slide are not collated: a lazy image has no pixels to stack."""
    options: dict[str, Any] = {"multiprocessing_context": "spawn", "persistent_workers": True} if workers else {}
    # A generator of its own: an iterator draws a number when it is made, which a continued run makes anew.
    generator = torch.Generator()
    return {"batch_size": None, "num_workers": workers, "collate_fn": _as_it_is, "generator": generator, **options}


def _as_it_is(batch: Any) -> Any:
    return batch
