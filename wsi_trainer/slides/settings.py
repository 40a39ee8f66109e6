"""What a user decides about a conversion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from wsi_trainer.errors import UserError

from .readers.options import Range, ReadOptions
from .rules.choice import Rules
from .store.codec import ZstdCodec
from .store.layout import Layout

FORMAT = 1
"""Changes whenever the same settings give other bytes, so that old and new shards are never mixed."""


MOST_LEVELS = 24
"""More than the largest slide there can be has, down to one pixel."""


@dataclass(frozen=True)
class Settings:
    """How slides are converted. Equal settings give equal stores.

    Attributes:
        mpp: Micrometres per pixel of the result; None keeps the slide's own pixels, bit for bit.
        source_mpp: The resolution of the slides, where their files do not say it or say it wrong.
        tissue: otsu, none, or geojson (SLIDE.geojson beside the slide, or in `geojson`).
        geojson: Folder of the GeoJSON files, named like the slides.
        background: keep leaves all pixels as they are; constant paints what is not tissue in the fill value,
            so that its tiles are identical and free in training.
        levels: Levels of the pyramid; None makes as many as it takes to fit 512 px.
        channel: The channel to convert of slides with several, by its name in the file or its number from 0.
        to_8bit: LOW:HIGH, the values that become 0 and 255, for slides whose pixels have other than 8 bits.
        crop: none converts the whole canvas; bounds only the part that was scanned, where the file tells it.
        chunk: Side of what is read at once, in pixels.
        shard: Side of what is written at once and is one file.
        compression: Level of zstd.
        rules: What else is taken out of the mask, or put in.
    """

    mpp: float | None = None
    source_mpp: float | None = None
    tissue: Literal["otsu", "none", "geojson"] = "otsu"
    geojson: Path | None = None
    background: Literal["keep", "constant"] = "keep"
    levels: int | None = None
    crop: Literal["none", "bounds"] = "none"
    chunk: int = 512
    shard: int = 4096
    compression: int = 3
    channel: str | None = None
    to_8bit: str | None = None
    rules: Rules = field(default_factory=Rules)

    def __post_init__(self) -> None:
        if self.background == "constant" and self.tissue == "none":
            raise UserError("--background constant needs a tissue mask: give --tissue otsu or --tissue geojson")
        if self.rules.chosen and self.tissue == "none":
            raise UserError("--rules change a tissue mask, and --tissue none makes none: give --tissue otsu or geojson")
        if self.levels is not None and not 1 <= self.levels <= MOST_LEVELS:
            raise UserError(f"--levels {self.levels}: expected 1 to {MOST_LEVELS}; each is half of the one before")
        for name in ("mpp", "source_mpp"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1000:
                raise UserError(f"--{name} {value:g}: expected micrometres per pixel, above 0 and below 1000")
        _ = self.reading
        try:
            _ = self.layout
        except ValueError as error:
            raise UserError(str(error)) from error

    @property
    def layout(self) -> Layout:
        """Sizes of chunks and shards."""
        return Layout(self.chunk, self.shard)

    @property
    def reading(self) -> ReadOptions:
        """What is taken of slides that are more than one image of 8 bits."""
        return ReadOptions(self.channel, Range.parse(self.to_8bit) if self.to_8bit is not None else None)

    def make_codec(self) -> ZstdCodec:
        """What encodes and decodes chunks."""
        return ZstdCodec(self.compression)

    def record(self) -> Mapping[str, Any]:
        """What is kept in the store: all that decides its bytes, nothing of this machine."""
        values = asdict(self)
        values.pop("geojson")
        values["rules"] = self.rules.record()
        for name, default in (("crop", "none"), ("channel", None), ("to_8bit", None), ("rules", {})):
            if values[name] == default:
                del values[name]  # as in stores that were made before it could be chosen
        # Stores of earlier versions could be of another codec, and say which.
        return {
            "format": FORMAT,
            "mpp": values.pop("mpp"),
            "source_mpp": values.pop("source_mpp"),
            "codec": "zstd",
            **values,
        }
