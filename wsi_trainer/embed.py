"""The command `embed`: features of patches by an encoder that is not trained."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import nn

from lightning_plugin import Box
from wsi_trainer.data.cohort import read_headers
from wsi_trainer.data.dataset import DataConfig
from wsi_trainer.data.features import Layout, Written, made_with, origin_of, write
from wsi_trainer.data.manifest import SlideRecord, check_files
from wsi_trainer.data.patches import PatchConfig, open_bag
from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.fit.config import Loaded, TrainConfig, check_bags, instantiate, make_parser, parse
from wsi_trainer.fit.predictor import BATCH, Predictor
from wsi_trainer.fit.trainer import at_work, precision_of
from wsi_trainer.io.arrays import import_h5py
from wsi_trainer.io.display import say
from wsi_trainer.io.files import LOCKS, Locked, lock
from wsi_trainer.models import PatchEncoder, SlideModel
from wsi_trainer.models.allowed import limits_imports
from wsi_trainer.models.finetune import merge_low_rank
from wsi_trainer.models.weights import load_weights
from wsi_trainer.slide.identity import SlideId
from wsi_trainer.slide.names import slide_name
from wsi_trainer.slide.views import Bag


@dataclass
class Embedder:
    """Writes a file of features for each slide; those that are there are not made again."""

    predictor: Predictor
    patches: PatchConfig
    out: Path
    layout: Layout
    batch: int
    skipped: dict[str, str] = field(default_factory=dict)
    kept: int = 0

    def __post_init__(self) -> None:
        model, data, config = self.predictor.loaded
        assert isinstance(model.backbone, PatchEncoder)
        self.encoder, self.weights, self.skip = model.backbone, digest(model), data.on_error == "skip"
        self.half = precision_of(config).startswith("bf16")

    def embed(self, records: Iterable[SlideRecord]) -> Iterator[tuple[str, int]]:
        """Each slide's name and how many patches were encoded for it, as they are done."""
        for record in records:
            try:
                yield record.slide, self._slide(record)
            except SlideError as error:
                if not self.skip:
                    raise
                self.skipped[record.slide] = str(error)

    def _slide(self, record: SlideRecord) -> int:
        name = slide_name(record.path)
        path = self.out / f"{name}.h5"
        try:
            with lock(self.out / LOCKS / f"{name}.lock"):
                return self._kept(record, path) if path.is_file() else self._made(record, path)
        except Locked as error:
            raise UserError(
                f"{path} is being made by another run; give the same command again when that has ended"
            ) from error

    def _kept(self, record: SlideRecord, path: Path) -> int:
        """Keep a file, if it is the one that would be made."""
        weights, origin = made_with(path)
        if weights != self.weights:
            raise UserError(f"{path} was made with another encoder or other weights; choose another --out")
        wanted = (origin_of(record, self.patches, self.half, of_1_0) for of_1_0 in (False, True))
        if origin and origin not in wanted:
            raise UserError(
                f"{path} was made of other pixels, of other patches or in another precision than {record.slide} has "
                "now; choose another --out, or remove it, and it is made again"
            )
        self.kept += 1
        return 0

    def _made(self, record: SlideRecord, path: Path) -> int:
        origin = origin_of(record, self.patches, self.half)
        try:
            bag = open_bag(record.open(), self.patches)
        except OSError as error:
            raise SlideError(record.path, f"cannot be read: {error.strerror or error}") from error
        about = self._about(record, bag, origin)
        if self.layout == "stamp":
            if bag.place.mpp is None:
                bag.close()
                raise SlideError(
                    record.slide, "STAMP counts in micrometres, which are not known; fill in the manifest's column mpp"
                )
            about = replace(about, places=about.places.in_micrometres(bag.place.mpp))
        try:
            write(path, (bag.shape[0], self.encoder.out_channels), self._batches(bag), about, self.layout)
        finally:
            bag.close()
        return bag.shape[0]

    def _batches(self, bag: Bag) -> Iterator[NDArray[np.float32]]:
        count, _, size, _ = bag.shape
        boxes = [
            Box((start, 0, 0), (min(start + self.batch, count), size, size)) for start in range(0, count, self.batch)
        ]
        for box, following in zip(boxes, [*boxes[1:], None]):
            patches = bag.read(box)
            if following is not None:
                bag.prefetch([following])
            rows = self.predictor.encode(patches)
            if not np.isfinite(rows).all():
                raise UserError(
                    f"{self.out}: the encoder makes numbers that are not finite; set train.precision: 32-true"
                )
            yield rows

    def _about(self, record: SlideRecord, bag: Bag, origin: str) -> Written:
        published = self.encoder.published
        return Written(
            name=slide_name(record.path),
            places=bag.places,
            size=bag.side,
            step=self.patches.step,
            mpp=None if bag.resolution is None else bag.resolution.mean,
            encoder=type(self.encoder.network).__name__ if published is None else published.name,
            weights=self.weights,
            origin=origin,
            slide_hash=SlideId.of(record.path).hash,
        )


def digest(model: nn.Module) -> str:
    """A checksum of the weights of an encoder and of the colours by which patches are normalised."""
    found = hashlib.sha256()
    backbone: nn.Module = model.backbone  # type: ignore[assignment]
    named = {**backbone.state_dict(), "mean": model.mean, "std": model.std}
    for name, value in named.items():
        found.update(name.encode())
        # A copy: a single number may have a stride that its bytes have not.
        dense = value.detach().cpu().flatten().clone(memory_format=torch.contiguous_format)
        found.update(dense.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@limits_imports
def embed(words: Sequence[str]) -> int:
    """Write the features of the patches of slides."""
    parser = make_parser(
        "embed",
        "Write the features of each slide's patches (data.patches) by an encoder that is not trained (model.backbone "
        "PatchEncoder, with its weights as model.pretrained), one HDF5 file for each slide of the manifest, in the "
        "folder --out. Files that are there are kept.",
    )
    parser.add_argument("--batch", type=int, default=BATCH, help="patches that are encoded at a time")
    parser.add_argument(
        "--layout",
        type=Layout,
        default="trident",
        help="whose files: trident, which CLAM and MIL-Lab read too, or stamp",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=None,
        help="a checkpoint of a run with this config, instead of model.pretrained: features of the encoder it trained",
    )
    options = parse(parser, words)
    model, data, config = instantiate(parser, options)
    if model.pretrained is None and options.checkpoint is None:
        raise UserError(
            "embed needs model.pretrained, or --checkpoint: features of an encoder with random weights say nothing"
        )
    with at_work(Path(options.out)):
        write_features(model, data, config, Path(options.out), options.layout, options.batch, options.checkpoint)
    return 0


def write_features(
    model: SlideModel,
    data: DataConfig,
    config: TrainConfig,
    out: Path,
    layout: Layout = "trident",
    batch: int = BATCH,
    checkpoint: Path | None = None,
) -> None:
    """Write the features of all slides of the manifest.

    Args:
        model: Its backbone is the encoder, which takes its weights from `pretrained`.
        data: The slides, and the patches of them.
        config: Device and precision.
        out: The folder; files that are there are kept.
        layout: Whose files.
        batch: Patches that are encoded at a time.
        checkpoint: Weights of a run, instead of `pretrained`.
    """
    if data.patches is None:
        raise UserError("embed needs data.patches: which patches of a slide are encoded")
    check_bags(model, data)
    if batch < 1:
        raise UserError(f"--batch is {batch}; it must be 1 or more")
    import_h5py(out)
    console = Console()
    if checkpoint is not None:
        load_weights(model, checkpoint)
        merge_low_rank(model.backbone)
    else:
        for line in str(model.load_pretrained()).splitlines():
            say(console, line)
    records = data.records(labelled=False)
    check_files(records)
    read_headers(records)
    out.mkdir(parents=True, exist_ok=True)
    bits = precision_of(config).partition("-")[0]
    encoded = replace(config, precision={"64": "64-true", "bf16": "bf16-mixed"}.get(bits, "32-true"))
    embedder = Embedder(Predictor(Loaded(model, data, encoded)), data.patches, out, layout, batch)
    for slide, count in embedder.embed(records):
        if count:
            say(console, f"{slide}: {count} patches")
    say(console, f"features of {len(records) - len(embedder.skipped)} slides, {embedder.kept} of them kept: {out}")
    for slide, reason in embedder.skipped.items():
        say(console, f"left out: {slide}: {reason}")
