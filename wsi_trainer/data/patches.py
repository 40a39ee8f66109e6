"""Bags: the patches of a slide, on a grid over its tissue or from a file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import shapely
from numpy.typing import NDArray
from shapely.geometry import shape

from wsi_trainer.errors import AbsentResolution, SlideError, UserError
from wsi_trainer.io.arrays import open_hdf5, own
from wsi_trainer.io.display import clean
from wsi_trainer.io.tables import read_table
from wsi_trainer.io.untrusted import Unreadable, read_json
from wsi_trainer.regions.outlines import geometries
from wsi_trainer.slide.augment import Augmentation, Augmented, Augmenter, PatchAugmentations, moved
from wsi_trainer.slide.formats.base import is_plausible
from wsi_trainer.slide.geometry import Pair
from wsi_trainer.slide.names import file_about
from wsi_trainer.slide.places import Places
from wsi_trainer.slide.slide import Slide
from wsi_trainer.slide.tissue import TissueMask
from wsi_trainer.slide.views import Bag, Image, Positions, along_blocks

MOST = 10_000_000
"""Patches that a slide can have: a file that claims more is damaged."""


def read_coords(path: Path) -> Places:
    """The patches of a file, with what it says of their size and of the slide; an error where it says no size."""
    found = coords_of(path)
    if found.side is None:
        raise SlideError(
            path,
            "coords says nothing of the size of its patches: there is neither patch_size_level0 (TRIDENT) nor "
            "patch_size with downsample (CLAM) nor tile_size_um (STAMP); take the file that was written when patches "
            "were chosen, not that of features",
        )
    return found


def coords_of(path: Path) -> Places:
    """The patches of a file, which may say nothing of their size."""
    try:
        with open_hdf5(path) as file:
            found = own(path, file, "coords")
            if not hasattr(found, "dtype"):
                raise SlideError(path, f"has no dataset coords; it has {', '.join(map(str, file)) or 'none'}")
            shape = found.shape[1:] if found.ndim == 3 and found.shape[0] == 1 else found.shape
            if len(shape) != 2 or shape[1] != 2 or shape[0] > MOST or found.dtype.kind not in "iuf":
                raise SlideError(path, f"coords is {found.shape} of {found.dtype}; it must be (patches, 2) of numbers")
            points, attributes = found[()].astype(np.float64).reshape(shape), {**file.attrs, **found.attrs}
    except Unreadable as error:
        raise SlideError(path, error.reason) from error
    try:
        if attributes.get("unit") == "um":
            pixels = _pixels_of(attributes, "tile_size_px")
            return Places(path, points, side=_tile_of(attributes), pixels=pixels, micrometres=True)
        pixels = _pixels_of(attributes, "patch_size")
        return Places(path, points, side=side_of(attributes), slide=slide_of(attributes), pixels=pixels)
    except (TypeError, ValueError) as error:
        raise SlideError(path, f"an attribute of coords is no number: {error}") from error


def _tile_of(attributes: Mapping[str, Any]) -> float | None:
    """Micrometres along a side of a patch, as STAMP says them, by its newer and its older name."""
    found = attributes.get("tile_size_um", attributes.get("tile_size"))
    return None if found is None else _number(found)


def _pixels_of(attributes: Mapping[str, Any], name: str) -> int | None:
    """Pixels along a side of a patch as its encoder takes it."""
    return (round(_number(attributes[name])) or None) if name in attributes else None


def side_of(attributes: Mapping[str, Any]) -> float | None:
    """Pixels of level 0 along a side of a patch: TRIDENT says them, CLAM says those of a level and what it shrinks."""
    if "patch_size_level0" in attributes:
        return _number(attributes["patch_size_level0"])
    if "patch_size" in attributes and "downsample" in attributes:
        return _number(attributes["patch_size"]) * _number(attributes["downsample"])
    if "patch_size" in attributes and "patch_level" in attributes and _number(attributes["patch_level"]) == 0:
        return _number(attributes["patch_size"])
    return None


def slide_of(attributes: Mapping[str, Any]) -> tuple[int, int] | None:
    """Height and width of level 0 of the slide, which TRIDENT says."""
    if "level0_width" not in attributes or "level0_height" not in attributes:
        return None
    return int(_number(attributes["level0_height"])), int(_number(attributes["level0_width"]))


def _number(value: Any) -> float:
    """An attribute as a number above or equal to 0; of x and y, which a shrunk level has, the mean."""
    number = float(np.mean(np.asarray(value, np.float64)))
    if not 0 <= number < 1e9:
        raise ValueError(f"{value!r}")
    return number


NEAR = 0.02
"""By how much of their side squares may differ: tools round corners."""


def read_outlines(path: Path) -> Places:
    """The middles of all squares and points of a file, and the side of its squares."""
    try:
        content = read_json(path)
        parts = _parts([shape(geometry) for geometry, _ in geometries(content)])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, shapely.errors.ShapelyError) as error:
        raise SlideError(path, f"not GeoJSON with squares or points ({type(error).__name__}: {error})") from error
    kinds = shapely.get_type_id(parts)
    if wrong := [part for part, kind in zip(parts, kinds) if kind not in (0, 3)]:
        raise SlideError(path, f"has a geometry of the type {wrong[0].geom_type}; patches are squares, or points")
    bounds = shapely.bounds(parts).reshape(-1, 4)
    if not np.isfinite(bounds).all():
        raise SlideError(path, "has an empty geometry; patches are squares, or points")
    sides = (bounds[:, 2:] - bounds[:, :2])[kinds == 3]
    side = float(sides.mean()) if len(sides) else None
    if side is not None:
        areas = shapely.area(parts)[kinds == 3]
        odd = (abs(sides - side) > NEAR * side).any(axis=1) | (abs(areas - side**2) > 3 * NEAR * side**2)
        if odd.any():
            x, y = bounds[kinds == 3][odd][0][:2]
            raise SlideError(path, f"the outline at x {x:g}, y {y:g} is no square of {side:g} pixels like the others")
    return Places(path, (bounds[:, :2] + bounds[:, 2:]) / 2, middle=True, side=side)


def _parts(found: list[Any]) -> Any:
    """Geometries without those that only hold others, as QuPath writes points that were set together."""
    parts = np.array(found, dtype=object)
    while len(parts) and (shapely.get_type_id(parts) > 3).any():
        parts = shapely.get_parts(parts)
    return parts


def chosen_patches(folder: Path, called: Iterable[str | Path]) -> Places:
    """Patches from the file of a slide; an error where there is none, or more than one."""
    found = file_about(folder, called, READERS, "data.patches.positions")
    assert found is not None
    kind, path = found
    return READERS[kind](path)


def read_csv(path: Path) -> Places:
    """The columns x and y of a table: upper left corners."""
    table = read_table(path)
    table.need("x", "y")
    points = np.empty((len(table.rows), 2))
    for number, (line, row) in enumerate(table.rows):
        try:
            points[number] = float(row["x"]), float(row["y"])
        except ValueError as error:
            raise UserError(f"{path}, line {line}: x is {row['x']!r} and y is {row['y']!r}; give numbers") from error
    return Places(path, points)


READERS: dict[str, Callable[[Path], Places]] = {
    "{}.h5": read_coords,
    "{}_patches.h5": read_coords,
    "{}.geojson": read_outlines,
    "{}.csv": read_csv,
}
"""What reads which file, by its name."""


@dataclass(frozen=True, kw_only=True)
class PatchConfig:
    """Square patches of each slide, which are one bag to the network: every one of them is read in each step."""

    size: int = 224
    """Pixels along a side of a patch, as the encoder takes it."""
    mpp: float | Literal["own"] = 0.5
    """Micrometres per pixel of a patch; 0.5 is what is called 20x. A store's own level of it is taken as it is,
    else a finer one is filtered down; own takes the finest level as it is.
    """
    stride: int | None = None
    """Pixels from one patch to the next: less than `size` lets them overlap, more leaves gaps; null puts them side by
    side.
    """
    over: Literal["tissue", "slide"] = "tissue"
    """Which places of the grid are taken: those with tissue, or all."""
    min_tissue: float = 0.25
    """Least share of a patch that is tissue, from 0 (any of it) to 1 (all of it), where `over` is tissue."""
    positions: Path | None = None
    """Folder with the patches of each slide, to take these instead of a grid: SLIDE.h5 or SLIDE_patches.h5 (`coords` of
    CLAM or TRIDENT), SLIDE.geojson (squares, or points in the middle of patches) or SLIDE.csv (columns x and y, the
    upper left corner), in pixels of level 0 of the slide.
    """
    flip_rotate: bool = True
    """Show each patch in one of its eight orientations in training, besides `data.flip_rotate` of the slide."""
    shift: int = 0
    """Take each patch up to this many pixels aside in training."""
    stain: float = 0.0
    """Change the amount of each stain of each patch by up to this share in training, such as 0.05."""
    tint: float = 0.0
    """Shift each colour of each patch by up to this optical density in training, such as 0.02."""

    def __post_init__(self) -> None:
        for name, least in (("size", 1), ("stride", 1), ("shift", 0), ("stain", 0), ("tint", 0)):
            value = getattr(self, name)
            if value is not None and not least <= value < float("inf"):
                raise UserError(f"data.patches.{name} is {value}; it must be {least} or more")
        if self.mpp != "own" and not is_plausible(self.mpp):
            raise UserError(
                f"data.patches.mpp is {self.mpp}; it is micrometres per pixel, such as 0.5, and not a magnification"
            )
        if not 0 <= self.min_tissue <= 1:
            raise UserError(f"data.patches.min_tissue is {self.min_tissue}; it is a share, from 0 to 1")
        if self.positions is not None and not self.positions.is_dir():
            raise UserError(f"data.patches.positions is {self.positions}; there is no such folder")
        if self.positions is not None and self.stride is not None:
            raise UserError("data.patches.positions says where patches are; leave out data.patches.stride")

    @property
    def step(self) -> int:
        """Pixels from one patch of the grid to the next."""
        return self.size if self.stride is None else self.stride


Numbers = NDArray[np.int64]


def over_slide(shape: tuple[int, int], size: int, stride: int) -> Positions:
    """The corners of all patches of a grid that lie whole in an image."""
    rows, columns = (np.arange(0, side - size + 1, stride, dtype=np.int32) for side in shape)
    return np.stack(np.meshgrid(rows, columns, indexing="ij"), axis=-1).reshape(-1, 2)


def over_tissue(mask: TissueMask, shape: tuple[int, int], size: int, stride: int, share: float) -> Positions:
    """Corners of the grid's patches that hold tissue, and at least this share of it.

    Row by row of the grid, so that memory goes with what is found and not with the slide.
    """
    columns = np.arange(0, shape[1] - size + 1, stride)
    found = [np.empty((0, 2), np.int32)]
    for y in range(0, shape[0] - size + 1, stride):
        tissue = _tissue_in(mask, y, size, columns)
        taken = columns[(tissue > 0) & (tissue / size**2 >= share)]
        found.append(np.stack([np.full_like(taken, y), taken], axis=1).astype(np.int32))
    return np.concatenate(found)


def _tissue_in(mask: TissueMask, y: int, size: int, columns: Numbers) -> Numbers:
    """Pixels of tissue in each patch of a row of the grid, exactly: a patch may cut through pixels of the mask.

    Where the mask ends before the image, its last row and column go on, as everywhere.
    """
    scale, (height, width) = mask.scale, mask.mask.shape
    rows = np.arange(y // scale, (y + size - 1) // scale + 1)
    shares = np.minimum((rows + 1) * scale, y + size) - np.maximum(rows * scale, y)
    last = (int(columns[-1]) + size) // scale if len(columns) else 0
    profile = shares @ mask.mask[np.minimum(rows, height - 1)].astype(np.int64)  # pixels of each column of the mask
    profile = np.pad(profile, (0, max(0, last + 1 - width)), mode="edge")
    sums = np.concatenate([[0], np.cumsum(profile * scale)])

    def left_of(x: Numbers) -> Numbers:
        whole, rest = np.divmod(x, scale)
        return sums[whole] + profile[whole] * rest

    return left_of(columns + size) - left_of(columns)


log = logging.getLogger("wsi_trainer")

Tissue = Callable[[Image], TissueMask]
"""Where an image of a slide has tissue."""


def open_bag(
    slide: Slide, config: PatchConfig, tissue: Tissue = Image.tissue, readers: int = 2, finest: float | None = None
) -> Bag:
    """The patches of a slide, in the order in which they are best read.

    Args:
        slide: The slide, which is closed with the bag.
        config: Which patches.
        tissue: Finds the tissue, where patches are taken over it.
        readers: How many threads read it.
        finest: Micrometres per pixel to which a finer slide is shrunk, where `mpp` is own.
    """
    factors = _factors(slide, config, finest)
    image = Image(slide, factor=factors)
    positions = positions_of(image, config, tissue)
    positions = along_blocks(positions, config.size, image.block, image.size)
    if len(positions) == 1:
        _tell_single(slide.path)
    return Bag(slide, positions, config.size, factor=factors, threads=readers)


def positions_of(image: Image, config: PatchConfig, tissue: Tissue) -> Positions:
    """Corners of the patches of an image; an error where there are none."""
    path, size, shape = image.slide.path, config.size, image.size
    if config.positions is not None:
        try:
            return chosen_patches(config.positions, (image.slide.name, path)).positions(image.place, shape, size)
        except UserError as error:
            if isinstance(error, SlideError) and error.path == str(path):
                raise
            raise SlideError(path, str(error)) from error  # of its file: whoever leaves the slide out hears of both
    if min(shape) < size:
        raise SlideError(
            path,
            f"has {shape[0]} × {shape[1]} pixels at data.patches.mpp {config.mpp}, which is too small for one patch of "
            f"{size}; set a smaller data.patches.size, or a finer mpp",
        )
    if config.over == "slide":
        return over_slide(shape, size, config.step)
    mask = tissue(image)
    positions = over_tissue(mask, shape, size, config.step, config.min_tissue)
    if not len(positions):
        found = "no tissue was found on it" if not mask.mask.any() else f"{mask.share:.2%} of it is tissue"
        raise SlideError(
            path,
            f"none of its patches has data.patches.min_tissue {config.min_tissue:g} of tissue ({found}); set it lower, "
            "or take all patches by data.patches.over: slide",
        )
    return positions


def _factors(slide: Slide, config: PatchConfig, finest: float | None) -> Pair:
    """Pixels of level 0 along one pixel of a patch; an error says how to come by the resolution."""
    try:
        return slide.factors_from(finest) if config.mpp == "own" else slide.factors(config.mpp)
    except AbsentResolution as error:
        way_out = "set data.patches.mpp to what there is (own takes the finest level)"
        if slide.stored and config.mpp != "own":
            way_out += f", or convert the slide with `wsi-train preprocess --mpp {config.mpp:g}`"
        raise SlideError(slide.path, f"{error.reason}; {way_out}") from error


def augmented(source: Bag, slide: Augmentation, each: PatchAugmentations) -> Augmented:
    """A bag as it is shown in one epoch."""
    return Augmented(source.at(moved(source.positions, slide, each)), slide, each)


def augmenter_of(config: PatchConfig, seed: int) -> Augmenter:
    """Draws how the patches of bags are shown in training."""
    return Augmenter(seed, config.flip_rotate, config.shift, config.stain, config.tint)


@cache
def _tell_single(path: Path) -> None:
    log.warning(
        "%s: its bag is one patch; attention over it has nothing to choose from. Is data.patches.size or mpp meant for "
        "slides as small?",
        clean(path),
    )
