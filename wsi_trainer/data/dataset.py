"""Slides as batches of one: image, bag or features, target, and map of tissue.

The processes of a data loader import this file: it imports no Lightning, which takes seconds.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor
from torch.utils.data import Dataset

from lightning_plugin import Box, LazyImage, TileSource
from wsi_trainer.data.covariates import Absent
from wsi_trainer.data.features import FeatureSource, features_of
from wsi_trainer.data.manifest import SlideRecord, by_patient, read_manifest
from wsi_trainer.data.patches import PatchConfig, augmented, augmenter_of, open_bag
from wsi_trainer.data.splits import By
from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.models.batch import SlideBatch, make_batch
from wsi_trainer.models.segmentation import SegmentationTask
from wsi_trainer.models.tasks import Task
from wsi_trainer.regions.target import Legend, counted, open_target
from wsi_trainer.slide.augment import AS_IT_IS, Augmentation, Augmented, Augmenter
from wsi_trainer.slide.formats.base import FILL
from wsi_trainer.slide.tissue import TissueMask
from wsi_trainer.slide.views import Bag, BlockView, Image, View, naming


def readers_of(given: int | None = None) -> int:
    """Threads that read and decode a slide: as many as were given, or a number that suits the device.

    A processor decodes some 300 megapixels a second and computes a network on less than one, so two threads never wait
    long and take little from it. A GPU computes as fast as several processors decode; one is left for what feeds it.
    """
    if given is not None:
        return given
    return max(2, min(8, processors() - 1)) if torch.cuda.is_available() else 2


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def dense(source: TileSource) -> Tensor:
    """All pixels of a source. It holds the whole image: for slides that fit.

    Channel by channel: where the channels of a pixel lie together, oneDNN writes outside of its memory in the backward
    pass of strided 1 x 1 kernels over eight channels or fewer, and ends the process (PyTorch 2.13).
    """
    lead = source.instances or 0
    return source.read(Box.whole((*source.shape[:lead], *source.shape[max(lead, 1) + 1 :]))).contiguous()


TISSUE = 0


def tissue_of(image: BlockView) -> TissueMask:
    """The tissue of an image; an error where there is none."""
    mask = image.tissue()
    if not mask.mask.any():
        raise SlideError(
            image.slide.path,
            "no tissue was found on it, so there is nothing to pool over; use pool_over and batchnorm_over: slide",
        )
    return mask


class _Mask(TileSource):
    """A tissue mask, pixel for pixel; background has the value that an augmented slide is filled with."""

    dtype = torch.uint8

    def __init__(self, mask: TissueMask, size: tuple[int, int]) -> None:
        self.mask, self.shape = mask, (1, 1, *size)

    def read(self, box: Box) -> Tensor:
        covered = self.mask.cover(*box.lo, *box.extent)
        return torch.from_numpy(np.where(covered, np.uint8(TISSUE), np.uint8(FILL)))[None, None]

    def constant(self, box: Box) -> Tensor | None:
        return None if self.mask.any_in(*box.lo, *box.extent) else torch.full((1,), FILL, dtype=self.dtype)


class TissueMap(TileSource):
    """1 for each position of a map that stands for at least one pixel with tissue, else 0; shape (1, 1, h, w).

    A position stands for the `stride` × `stride` pixels from its place times the stride on.

    Args:
        mask: The tissue of an image.
        size: Height and width of the image.
        stride: Pixels of the image along one position.
        how: How the slide is shown.
    """

    dtype = torch.uint8

    def __init__(self, mask: TissueMask, size: tuple[int, int], stride: int, how: Augmentation = AS_IT_IS) -> None:
        self._pixels, self.stride = Augmented(_Mask(mask, size), how), stride
        height, width = self._pixels.shape[2:]
        self.shape = (1, 1, -(-height // stride), -(-width // stride))

    def read(self, box: Box) -> Tensor:
        inside = self._inside(box)
        tissue = (self._pixels.load(inside) != FILL).float()
        rows, columns = box.extent
        missing = (columns * self.stride - inside.extent[1], rows * self.stride - inside.extent[0])
        padded = torch.nn.functional.pad(tissue, (0, missing[0], 0, missing[1]))
        return torch.nn.functional.max_pool2d(padded, self.stride).to(self.dtype)

    def constant(self, box: Box) -> Tensor | None:
        value = self._pixels.constant(self._inside(box))
        return None if value is None or int(value[0]) != FILL else torch.zeros(1, dtype=self.dtype)

    def _inside(self, box: Box) -> Box:
        """The pixels that the positions of a box stand for."""
        size = self._pixels.shape[2:]
        lo = tuple(at * self.stride for at in box.lo)
        return Box(lo, tuple(min(at * self.stride, end) for at, end in zip(box.hi, size)))


class Joined(View):
    """Several views, one behind the other along the first axis of their boxes.

    Of bags, (K, 3, size, size), that is the axis of instances; of features, (1, width, K, 1), the rows. A pass over
    tiles reads their boxes in order, and so goes through the views once: where reading goes on in another view, the one
    before is closed, so that one slide's pixels are kept at a time.
    """

    def __init__(self, parts: Sequence[View]) -> None:
        """Join views whose shapes differ in nothing but the joined axis."""
        self.parts, first = tuple(parts), parts[0]
        self.instances, self.dtype, self.memory_format = first.instances, first.dtype, first.memory_format
        self._axis = 0 if self.instances else 2
        self._ends = list(accumulate(part.shape[self._axis] for part in parts))
        shapes = {part.shape[: self._axis] + part.shape[self._axis + 1 :] for part in parts}
        if len(shapes) > 1 or len({part.dtype for part in parts}) > 1:
            raise ValueError(f"sources of shapes {[part.shape for part in parts]} cannot be joined along one axis")
        self.shape = (*first.shape[: self._axis], self._ends[-1], *first.shape[self._axis + 1 :])
        self._held: int | None = None
        super().__init__(first.name)

    def load(self, box: Box) -> Tensor:
        """The pixels of a box, which may lie in several parts."""
        pieces = list(self._pieces(box))
        if not pieces:  # a box without positions lies in no part
            return self.parts[0].load(Box((0, *box.lo[1:]), (0, *box.hi[1:])))
        with self._lock:  # another thread may read a part that is about to be closed
            return torch.cat([self._part(number, own) for number, own in pieces], dim=self._axis)

    def constant(self, box: Box) -> Tensor | None:
        """The value of each channel, if all parts of the box are known to hold it alone."""
        values = [self.parts[number].constant(own) for number, own in self._pieces(box)]
        first = values[0] if values else None
        return first if all(v is not None and first is not None and torch.equal(v, first) for v in values) else None

    def close(self) -> None:
        super().close()
        for part in self.parts:
            part.close()

    def _part(self, number: int, box: Box) -> Tensor:
        if self._held is not None and self._held != number:
            self.parts[self._held].close()
        self._held = number
        with naming(self.parts[number].name, box):
            return self.parts[number].load(box)

    def _pieces(self, box: Box) -> Iterator[tuple[int, Box]]:
        """The parts that a box lies in, and its share of each in that part's own positions."""
        first, last = box.lo[0], box.hi[0]
        number = bisect_right(self._ends, first)
        while first < last:
            if number == len(self._ends):
                raise IndexError(f"{box} leaves the {self._ends[-1]} positions of {len(self.parts)} joined sources")
            begin = self._ends[number - 1] if number else 0
            end = min(last, self._ends[number])
            yield number, Box((first - begin, *box.lo[1:]), (end - begin, *box.hi[1:]))
            first, number = end, number + 1


ToImage = Callable[[TileSource], Tensor]
MASKS = 64 << 20
"""Bytes of tissue masks that a process keeps."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Slides, their splits, and how they are read."""

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
    extra_downsamples: tuple[int, ...] = ()
    """Further magnifications of each slide, as factors by which it is shrunk, such as [4, 16];
    `model.magnifications` is then one more than they are.
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
    absent_covariates: Absent = "refuse"
    """Columns of `model.covariates` that a manifest lacks: an error, or taken for missing of all its slides."""
    validation: float = 0.2
    """Share of the patients that choose the checkpoint, where the manifest has no split val."""
    test: float = 0.2
    """Share of the patients that are held out, where the manifest has no splits."""
    split_by: By = "patient"
    """What the splits that the manifest leaves open never divide: a patient, or a whole site, so that the model is
    judged on sites that it was not trained on.
    """
    splits: Path | None = None
    """File with the split of each slide that others published, instead of the manifest's: CLAM's splits_0.csv, a
    table of Patho-Bench (k=all.tsv), or STAMP's splits.json. A patient in two splits is refused.
    """
    fold: int = 0
    """Which fold of `splits`, where the file has several."""
    balance: bool = False
    """Whether each class has its equal share of an epoch's visits, however rare it is."""
    flip_rotate: bool = True
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
    """Read and augment tiles beside the step, and open the next slide: no result depends on it."""
    on_error: Literal["stop", "skip"] = "stop"
    """What a slide that cannot be read does: end the run, or be left out; the latter is written to failures.csv."""

    def __post_init__(self) -> None:
        if self.downsample < 1:
            raise UserError(f"data.downsample is {self.downsample}; it must be 1 or more")
        factors = [self.downsample, *self.extra_downsamples]
        if factors != sorted(set(factors)):
            raise UserError(
                f"data.extra_downsamples is {factors[1:]}; give rising factors above data.downsample, {factors[0]}"
            )
        if self.patches is not None and (self.downsample != 1 or self.extra_downsamples):
            key = "downsample" if self.downsample != 1 else "extra_downsamples"
            raise UserError(f"data.{key} is for whole images; with data.patches say data.patches.mpp, and leave it out")
        if self.features is not None:
            for key, given in (
                ("patches", self.patches is not None),
                ("downsample", self.downsample != 1),
                ("extra_downsamples", self.extra_downsamples),
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


def as_it_is(batch: SlideBatch) -> SlideBatch:
    """Not collated: it stands here since the processes of a loader import the file that it is in."""
    return batch


class Visit(NamedTuple):
    """A slide and an epoch, which decides about augmentation."""

    slide: int
    """Place in the list of slides."""
    epoch: int


class SlideDataset(Dataset[SlideBatch]):
    """Slides by their place in the manifest, each a batch of one."""

    def __init__(
        self,
        records: Sequence[SlideRecord],
        targets: Mapping[str, Mapping[str, Tensor]] | None,
        config: DataConfig,
        to_image: ToImage,
        augmenter: Augmenter | None = None,
        tissue_stride: int | None = None,
        legends: Mapping[str, Legend] | None = None,
        places: bool = False,
        covariates: Mapping[str, Tensor] | None = None,
        sees_slide: bool = True,
    ) -> None:
        """Keep what is needed to open a slide.

        Args:
            records: The slides.
            targets: By slide its targets, by name; None where slides have none.
            config: How slides are read.
            to_image: Makes the image of the batch from a source.
            augmenter: Draws how a slide is shown in an epoch; without it slides are shown as they are.
            tissue_stride: Pixels for one position of the map of tissue; without it a batch has none.
            legends: Classes of drawn regions, by the names of targets of pixels.
            places: Whether a batch has the places of patches.
            covariates: Numbers of the model's covariates, by slide.
            sees_slide: Whether slides are opened; a batch of covariates alone has one 0 as its image.
        """
        self.records = list(records)
        self.targets = targets or {}
        self.legends = legends or {}
        self.config = config
        self.to_image = to_image
        self.augmenter = augmenter
        self.tissue_stride = tissue_stride
        self.places = places
        self.covariates = covariates or {}
        self.sees_slide = sees_slide
        self.readers = readers_of(config.readers)
        self._masks: OrderedDict[tuple[Path, tuple[float, float]], TissueMask] = OrderedDict()

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, visit: Visit) -> SlideBatch:
        record = self.records[visit.slide]
        batch = make_batch(torch.zeros(1, 1, 1, 1), self.targets.get(record.slide, {}), record.slide)
        if record.slide in self.covariates:
            batch["covariates"] = self.covariates[record.slide]
        if not self.sees_slide:
            return batch
        try:
            if self.config.patches is None and self.config.features is None:
                self._open(batch, record, visit)
            else:
                parts = [self._part(part, visit) for part in record.parts or (record,)]
                shown = [view for view, _ in parts]
                batch["image"] = self._image(Joined(shown) if record.parts else shown[0])
                if self.places:
                    batch["places"] = _places([source for _, source in parts])
        except (UserError, OSError) as error:
            # The step says so: here, perhaps in another process, nobody knows whether the run may go on.
            # Of a patient's slides it is the error that names the one.
            batch["failure"] = str(error) if record.parts else getattr(error, "reason", str(error))
        return batch

    def _open(self, batch: SlideBatch, record: SlideRecord, visit: Visit) -> None:
        factors = [self.config.downsample, *self.config.extra_downsamples]
        slide = record.open()
        y, x = slide.factors_from(record.finest)
        images = [Image(slide, factor=(factor * y, factor * x), threads=self.readers) for factor in factors]
        how = AS_IT_IS if self.augmenter is None else self.augmenter.draw(record.slide, visit.epoch)
        shown = [_coarser(how, factor / factors[0]) for factor in factors]
        batch["image"], *context = [
            self._image(image if how == AS_IT_IS else Augmented(image, how)) for image, how in zip(images, shown)
        ]
        for name, legend in self.legends.items():
            drawn = Augmented(drawn_on(record, images[0], legend), replace(shown[0], stain=None), name=record.slide)
            batch["targets"][name] = self._image(drawn)
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

    def _part(self, record: SlideRecord, visit: Visit) -> tuple[View, FeatureSource | Bag]:
        """The features of a slide's patches, or the patches as they are shown in an epoch, and as they are."""
        if self.config.features is not None:
            source = FeatureSource(features_of(self.config.features, record), record.slide)
            return source, source
        assert self.config.patches is not None
        return self._bag(record, visit, self.config.patches)

    def _bag(self, record: SlideRecord, visit: Visit, patches: PatchConfig) -> tuple[View, Bag]:
        tissue = partial(self._kept, find=Image.tissue)
        bag = open_bag(record.open(), patches, tissue, self.readers, record.finest)
        if self.augmenter is None:
            return bag, bag
        each = augmenter_of(patches, self.augmenter.seed).draw_patches(record.slide, visit.epoch, bag.shape[0])
        return augmented(bag, self.augmenter.draw(record.slide, visit.epoch), each), bag

    def _kept(self, image: Image, find: Callable[[Image], TissueMask]) -> TissueMask:
        """A mask, which is the same in every epoch; those that were used last are kept, up to `MASKS` bytes."""
        key = image.slide.path, image.image.scale
        if key not in self._masks:
            self._masks[key] = find(image)
            while len(self._masks) > 1 and sum(kept.mask.nbytes for kept in self._masks.values()) > MASKS:
                self._masks.popitem(last=False)
        self._masks.move_to_end(key)
        return self._masks[key]


def _places(sources: Sequence[FeatureSource | Bag]) -> Tensor:
    """The places of a slide's patches, as a batch has them: before augmentation, which moves a patch within its cell of
    the grid.
    """
    if len(sources) > 1:
        raise UserError(
            "model.head needs the places of patches, and those of several slides lie in no common plane; set "
            "data.group: slide"
        )
    return torch.from_numpy(sources[0].places.in_patches.T.astype(np.float32))[None, :, :, None]


def drawn_on(record: SlideRecord, image: Image, legend: Legend) -> TileSource:
    """The class of each pixel of a slide's image, as it was drawn."""
    path = Path(drawn) if (drawn := record.others.get("regions")) else None
    return open_target(path, legend, record.path, (image.shape[2], image.shape[3]), image.place)


def _coarser(how: Augmentation, times: float) -> Augmentation:
    """The same augmentation on an image with fewer pixels."""
    down, right = how.shift
    return replace(how, shift=(round(down / times), round(right / times)))


def grouped(config: DataConfig, records: Sequence[SlideRecord], task: Task | None) -> list[SlideRecord]:
    """Records of which batches are made: slides, or patients; without a task they need no labels."""
    if config.group == "slide" or any(record.parts for record in records):
        return list(records)
    return by_patient(records, () if task is None else task.columns)


def targets_of(task: Task, record: SlideRecord) -> dict[str, Tensor]:
    """The targets of a slide that are known, by name; an error names the slide and the cell."""
    try:
        return task.read(record.cells)
    except UserError as error:
        raise UserError(f"slide {record.slide} {error}") from error


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
    with Image(record.open(), factor=config.downsample) as image:
        whole = image.shape[2] * image.shape[3]
        with Augmented(drawn_on(record, image, task.legend), name=record.slide) as drawn:
            for pixels, part in counted(drawn, task.outputs):
                yield pixels / whole, part
