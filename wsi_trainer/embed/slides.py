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
from wsi_trainer.data.tissue import mask_of
from wsi_trainer.embed.layouts import Layout, Written, made_with, write
from wsi_trainer.embed.partial import PartialRows
from wsi_trainer.errors import UserError
from wsi_trainer.models import PatchEncoder, SlideClassifier
from wsi_trainer.slides.names import plain_name
from wsi_trainer.slides.patch_source import PatchSource


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
            except (UserError, OSError) as error:
                if not self.skip:
                    raise
                self.skipped[record.slide] = str(error)

    def _slide(self, record: SlideRecord) -> int:
        path = self.out / f"{plain_name(record.path)}.h5"
        if path.is_file():
            if made_with(path) != self.weights:
                raise UserError(f"{path} was made with another encoder or other weights; choose another --out")
            self.kept += 1
            return 0
        bag = open_bag(record.path, self.patches, mask_of, record.mpp)
        identity = {
            "weights": self.weights,
            "positions": hashlib.sha256(bag.positions.tobytes()).hexdigest(),
            "size": bag.size,
            "mpp": self.patches.resolution,
            "half": self.half,
        }
        rows = PartialRows(path, self.encoder.out_channels, self.batch, identity)
        try:
            before = rows.done
            for batch in self._batches(bag, rows.done):
                rows.append(batch)
            write(path, rows.memory(), self._about(record, bag), self.layout)
        finally:
            rows.close()
            bag.close()
        rows.remove()
        return bag.shape[0] - before

    def _batches(self, bag: PatchSource, done: int) -> Iterator[NDArray[np.float32]]:
        boxes = [
            Box((start, 0, 0), (min(start + self.batch, bag.shape[0]), bag.size, bag.size))
            for start in range(done, bag.shape[0], self.batch)
        ]
        for box, following in zip(boxes, [*boxes[1:], None]):
            patches = bag.read(box).to(self.model.device)
            if following is not None:
                bag.prefetch([following])
            device = self.model.device.type
            with torch.inference_mode(), torch.autocast(device, torch.bfloat16) if self.half else nullcontext():
                features = self.encoder(self.model.normalise(patches))[0, :, :, 0].t()
            yield features.float().cpu().numpy()

    def _about(self, record: SlideRecord, bag: PatchSource) -> Written:
        published = self.encoder.published
        return Written(
            name=plain_name(record.path),
            corners=bag.place.to_slide(bag.positions[:, ::-1]),
            slide=bag.place.shape,
            scale=sum(bag.place.scale) / 2,
            size=bag.size,
            step=self.patches.step,
            mpp=None if bag.mpp is None else sum(bag.mpp) / 2,
            encoder=type(self.encoder.network).__name__ if published is None else published.name,
            weights=self.weights,
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
