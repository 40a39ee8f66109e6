"""How many pixels of the slides each class has, for tasks whose weights of classes come from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from rich.progress import Progress
from torch import Tensor

from wsi_trainer.data.datamodule import DataConfig, drawn_on
from wsi_trainer.data.images import open_image
from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.errors import UserError
from wsi_trainer.models.tasks import SegmentationTask
from wsi_trainer.regions import counted
from wsi_trainer.slide.augment import Augmented
from wsi_trainer.slide.errors import SlideError


def pixels_of(
    records: Sequence[SlideRecord], task: SegmentationTask, config: DataConfig, progress: bool = True
) -> Tensor:
    """The pixels of each class on all of these slides, counted box by box.

    Args:
        records: The slides.
        task: Says which class each region means.
        config: How slides are read; a slide that cannot be is left out where `on_error` says so.
        progress: Whether to show a progress bar, which goes away at the end.
    """
    total = torch.zeros(task.outputs, dtype=torch.int64)
    with Progress(transient=True, disable=not progress) as bar:
        row = bar.add_task("pixels of each class", total=len(records))
        for number, record in enumerate(records):
            found = torch.zeros_like(total)
            try:
                for share, part in _parts(record, task, config):
                    found += part
                    bar.advance(row, share)
                total += found
            except (UserError, OSError) as error:
                if config.on_error != "skip":
                    raise SlideError(record.slide, getattr(error, "reason", str(error))) from error
                # Training meets the slide again, leaves it out, and writes it to failures.csv.
            bar.update(row, completed=number + 1)
    return total


def _parts(record: SlideRecord, task: SegmentationTask, config: DataConfig) -> Iterator[tuple[float, Tensor]]:
    """Box by box its share of the slide, and its pixels of each class."""
    with open_image(record.path, config.downsample, record.mpp) as image:
        whole = image.shape[2] * image.shape[3]
        with Augmented(drawn_on(record, image, task), name=record.slide) as drawn:
            for pixels, part in counted(drawn, task.outputs):
                yield pixels / whole, part
