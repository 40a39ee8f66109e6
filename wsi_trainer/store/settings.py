"""Options of `preprocess` and `tissue`: names, types and texts of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from wsi_trainer.errors import UserError
from wsi_trainer.slide.formats.base import Range, ReadOptions
from wsi_trainer.slide.rules import RULES, Blur, Edge, Fold, Pale, Pen, Rule, choose, record_of
from wsi_trainer.store.chunks import Layout

FORMAT = 1
"""Changes whenever the same settings give other bytes, so that old and new shards are never mixed."""


MOST_LEVELS = 24
"""More than the largest slide there can be has, down to one pixel."""


@dataclass(frozen=True, kw_only=True)
class MaskOptions:
    """Options for reading slides and finding their tissue."""

    source_mpp: float | None = None
    """Micrometres per pixel of the slides, where their files do not say it or say it wrong."""
    tissue: Literal["otsu", "none", "geojson"] = "otsu"
    """Method of the tissue mask: otsu by colour, geojson from outlines that you drew or edited."""
    geojson: Path | None = None
    """Folder with SLIDE.geojson for --tissue geojson, by default beside the slides; or the file of one slide."""
    crop: Literal["none", "bounds"] = "none"
    """bounds takes only the scanned part of slides whose canvas is larger (MRXS); positions in micrometres stay those
    of the slide.
    """
    channel: str | None = None
    """The channel to take of slides that have several, by its name in the file or its number from 0."""
    to_8bit: str | None = None
    """LOW:HIGH, the values that become 0 and 255, for slides whose pixels have more than 8 bits: 0:4095."""
    rules: str = "none"
    """Rules beside the mask, with commas: pen, edge, blur, fold are left out, pale is put in. usual is pen and blur,
    all is all, none leaves the mask as it is. OUT/tissue.html shows what each has found.
    """
    pale: Pale = field(default_factory=Pale)
    """Pale tissue that the threshold left out, which is put in."""
    pen: Pen = field(default_factory=Pen)
    """Pen marks."""
    edge: Edge = field(default_factory=Edge)
    """Edges of cover glass and rims of bubbles."""
    blur: Blur = field(default_factory=Blur)
    """Tissue out of focus."""
    fold: Fold = field(default_factory=Fold)
    """Folded tissue."""

    def __post_init__(self) -> None:
        if self.chosen and self.tissue == "none":
            raise UserError("--rules change a tissue mask, and --tissue none makes none: give --tissue otsu or geojson")
        check_mpp("source_mpp", self.source_mpp)
        _ = self.reading

    @property
    def chosen(self) -> tuple[Rule, ...]:
        """The rules that were asked for."""
        return choose(self.rules, [getattr(self, rule.name) for rule in RULES])

    @property
    def reading(self) -> ReadOptions:
        """Channel and range of slides that are more than one image of 8 bits."""
        return ReadOptions(self.channel, Range.parse(self.to_8bit) if self.to_8bit is not None else None)

    def drawn_in(self, outlines: Path) -> Self:
        """These options for a mask that somebody drew: without rules."""
        plain: dict[str, Any] = {rule.name: rule() for rule in RULES}
        return replace(self, tissue="geojson", geojson=outlines, rules="none", **plain)

    def decides_mask(self) -> dict[str, Any]:
        """All that decides a mask, but the values that are usual."""
        values = {"crop": self.crop, "channel": self.channel, "to_8bit": self.to_8bit, "rules": record_of(self.chosen)}
        usual: dict[str, Any] = {"crop": "none", "channel": None, "to_8bit": None, "rules": {}}
        unusual = {name: value for name, value in values.items() if value != usual[name]}
        return {"source_mpp": self.source_mpp, "tissue": self.tissue, **unusual}


@dataclass(frozen=True, kw_only=True)
class Options(MaskOptions):
    """Options for converting slides."""

    mpp: float | None = None
    """Micrometres per pixel of the result. Without it pixels stay as they are, bit for bit."""
    background: Literal["keep", "constant"] = "keep"
    """constant paints all that is not tissue white, so that it costs nothing in training."""
    levels: int | None = None
    """Levels of the pyramid; by default down to 512 px."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.background == "constant" and self.tissue == "none":
            raise UserError("--background constant needs a tissue mask: give --tissue otsu or --tissue geojson")
        if self.levels is not None and not 1 <= self.levels <= MOST_LEVELS:
            raise UserError(f"--levels {self.levels}: expected 1 to {MOST_LEVELS}; each is half of the one before")
        check_mpp("mpp", self.mpp)


@dataclass(frozen=True, kw_only=True)
class Settings(Options):
    """All that decides a conversion. Equal settings give equal stores."""

    chunk: int = 512
    """Side of what is read at once, in pixels."""
    shard: int = 4096
    """Side of what is written at once and is one file."""
    compression: int = 3
    """Level of zstd."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            _ = self.layout
        except ValueError as error:
            raise UserError(str(error)) from error

    @property
    def layout(self) -> Layout:
        """Sizes of chunks and shards."""
        return Layout(self.chunk, self.shard)

    def record(self) -> Mapping[str, Any]:
        """The entries that a store keeps: all that decides its bytes, nothing of this machine."""
        names = ("mpp", "background", "levels", "chunk", "shard", "compression")
        return {"format": FORMAT, "codec": "zstd"} | self.decides_mask() | {name: getattr(self, name) for name in names}


def check_mpp(name: str, value: float | None) -> None:
    """Refuses a size of a pixel that cannot be one."""
    if value is not None and not 0 < value < 1000:
        raise UserError(f"--{name} {value:g}: expected micrometres per pixel, above 0 and below 1000")
