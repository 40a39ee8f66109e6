"""The features of slides, one after the other: patches are read ahead while the encoder works on those before."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from lightning_plugin import Box
from wsi_trainer.data import PatchConfig, SlideRecord, open_bag
from wsi_trainer.embed.layouts import Layout, Written, made_with, write
from wsi_trainer.embed.origin import origin_of
from wsi_trainer.embed.partial import PartialRows, beside, remove
from wsi_trainer.errors import UserError
from wsi_trainer.models import PatchEncoder, SlideClassifier
from wsi_trainer.slide.errors import SlideError
from wsi_trainer.slide.views import Bag
from wsi_trainer.slides.staging import Locked, lock
from wsi_trainer.store.identity import plain_name


@dataclass
class Embedder:
    """Writes a file of features for each slide; those that are there are not made again."""

    model: SlideClassifier
    patches: PatchConfig
    out: Path
    layout: Layout
    batch: int
    half: bool
    """Whether the encoder works in bfloat16; features are float32 in any case."""
    skip: bool
    """Whether slides that cannot be read are left out."""
    skipped: dict[str, str] = field(default_factory=dict)
    kept: int = 0

    def __post_init__(self) -> None:
        encoder = self.model.backbone
        assert isinstance(encoder, PatchEncoder)
        self.encoder = encoder
        self.weights = digest(self.model)

    def embed(self, records: Iterable[SlideRecord]) -> Iterator[tuple[str, int]]:
        """Each slide's name and how many patches were encoded for it, as they are done."""
        self.model.eval()
        for record in records:
            try:
                yield record.slide, self._slide(record)
            except SlideError as error:
                if not self.skip:
                    raise
                self.skipped[record.slide] = str(error)

    def _slide(self, record: SlideRecord) -> int:
        name = plain_name(record.path)
        path = self.out / f"{name}.h5"
        try:
            with lock(self.out, name):
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
        if origin and origin != origin_of(record, self.patches, self.half):
            raise UserError(
                f"{path} was made of other pixels, of other patches or in another precision than {record.slide} has "
                "now; choose another --out, or remove it, and it is made again"
            )
        remove(beside(path))  # a run may have failed when all was written
        self.kept += 1
        return 0

    def _made(self, record: SlideRecord, path: Path) -> int:
        origin = origin_of(record, self.patches, self.half)
        try:
            bag = open_bag(record.path, self.patches, source_mpp=record.mpp, name=record.slide)
        except OSError as error:
            raise SlideError(record.path, f"cannot be read: {error.strerror or error}") from error
        places = hashlib.sha256(bag.positions.tobytes()).hexdigest()
        identity = {"weights": self.weights, "origin": origin, "positions": places}
        rows = PartialRows(path, self.encoder.out_channels, self.batch, identity)
        try:
            before = rows.done
            for batch in self._batches(bag, rows.done):
                rows.append(batch)
            write(path, rows.memory(), self._about(record, bag, origin), self.layout)
        finally:
            rows.close()
            bag.close()
        rows.remove()
        return bag.shape[0] - before

    def _batches(self, bag: Bag, done: int) -> Iterator[NDArray[np.float32]]:
        count, _, size, _ = bag.shape
        boxes = [
            Box((start, 0, 0), (min(start + self.batch, count), size, size)) for start in range(done, count, self.batch)
        ]
        for box, following in zip(boxes, [*boxes[1:], None]):
            patches = bag.read(box).to(self.model.device)
            if following is not None:
                bag.prefetch([following])
            device = self.model.device.type
            with torch.inference_mode(), torch.autocast(device, torch.bfloat16) if self.half else nullcontext():
                features = self.encoder(self.model.normalise(patches))[0, :, :, 0].t()
            yield features.float().cpu().numpy()

    def _about(self, record: SlideRecord, bag: Bag, origin: str) -> Written:
        published = self.encoder.published
        return Written(
            name=plain_name(record.path),
            corners=bag.place.to_slide(bag.positions[:, ::-1]),
            slide=bag.place.shape,
            scale=sum(bag.place.scale) / 2,
            size=bag.side,
            step=self.patches.step,
            mpp=None if bag.mpp is None else sum(bag.mpp) / 2,
            encoder=type(self.encoder.network).__name__ if published is None else published.name,
            weights=self.weights,
            origin=origin,
        )


def digest(model: nn.Module) -> str:
    """A checksum of the weights of an encoder and of the colours by which patches are normalised."""
    found = hashlib.sha256()
    backbone: nn.Module = model.backbone  # type: ignore[assignment]
    named = {**backbone.state_dict(), "mean": model.mean, "std": model.std}
    for name, value in named.items():
        found.update(name.encode())
        found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
