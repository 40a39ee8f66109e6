"""A source whose every failure names its slide."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from lightning_plugin import Box, TileSource
from wsi_trainer.data.passing import PassingSource
from wsi_trainer.slides.errors import SlideError


@dataclass(frozen=True, eq=False)
class CheckedSource(PassingSource):
    """Reads as another source does; what a decoder or a disk raises becomes a `SlideError`.

    Readers and decoders raise errors of many kinds, and none says which of hundreds of slides it was.
    """

    source: TileSource
    slide: str

    def read(self, box: Box) -> Tensor:
        try:
            return self.source.read(box)
        except SlideError:
            raise
        except Exception as error:
            raise SlideError(self.slide, f"cannot be read at {box}: {error or type(error).__name__}") from error

    def prefetch(self, boxes: Iterable[Box]) -> None:
        """Passes on what will be asked for soon, if the source wants to know."""
        wish = getattr(self.source, "prefetch", None)
        if wish is not None:
            wish(boxes)
