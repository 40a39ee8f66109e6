"""A source whose every failure names its slide."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_plugin import Box, TileSource
from wsi_trainer.slides.errors import SlideError


@dataclass(frozen=True, eq=False)
class CheckedSource:
    """Reads as another source does; what a decoder or a disk raises becomes a `SlideError`.

    Readers and decoders raise errors of many kinds, and none says which of hundreds of slides it was.
    """

    source: TileSource
    slide: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def instances(self) -> int | None:
        """How many of the first dimensions count images; None where the source knows of space alone."""
        return getattr(self.source, "instances", None)

    def read(self, box: Box) -> Tensor:
        try:
            return self.source.read(box)
        except SlideError:
            raise
        except Exception as error:
            raise SlideError(self.slide, f"cannot be read at {box}: {error or type(error).__name__}") from error

    def constant(self, box: Box) -> Tensor | None:
        return self.source.constant(box)

    def prefetch(self, boxes: Iterable[Box]) -> None:
        """Passes on what will be asked for soon, if the source wants to know."""
        wish = getattr(self.source, "prefetch", None)
        if wish is not None:
            wish(boxes)

    def forget(self) -> None:
        """Has the source let go of pixels, if it keeps any."""
        forget = getattr(self.source, "forget", None)
        if forget is not None:
            forget()
