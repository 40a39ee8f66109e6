"""Rules beside the tissue mask: each looks for one thing, and takes it out of the mask or puts it in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import binary_propagation, distance_transform_edt, find_objects, gaussian_filter, label

from wsi_trainer.errors import UserError
from wsi_trainer.slide.formats.base import Pixels
from wsi_trainer.slide.tissue import Mask, TissueMask, is_dark, large, near, without_dust

Values = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Overview:
    """A coarse copy of a slide and what is tissue on it so far."""

    pixels: Pixels
    """(height, width, 3), the pixels of the mask."""
    mpp: float
    """Micrometres along one of them."""
    mask: Mask
    finer: Callable[[int, int, int, int], Pixels]
    """The pixels of a box (top, left, height, width) of the mask, `times` as fine in both directions."""
    times: int = 1

    def pixels_of(self, micrometres: float) -> float:
        """A length in pixels of the mask."""
        return micrometres / self.mpp

    def least(self, square_millimetres: float) -> float:
        """An area in pixels of the mask."""
        return square_millimetres * 1e6 / self.mpp**2


def density(pixels: Pixels) -> Values:
    """Optical density of each channel, -log10 of the light that is left: stains add up in it."""
    table = -np.log10(np.maximum(np.arange(256, dtype=np.float32), 1) / 255)
    return table[pixels]


def within(default: float, low: float, high: float) -> float:
    """A parameter of a rule, with its least and its largest value."""
    value: float = field(default=default, metadata={"limits": (low, high)})
    return value


class Rule:
    """Base class of a rule: a frozen dataclass of its parameters."""

    name: ClassVar[str]
    """As it is called in options, tables and pictures."""
    looks_for: ClassVar[str]
    colour: ClassVar[tuple[int, int, int]]
    """In pictures and in QuPath."""
    usual: ClassVar[bool] = False
    """Part of `--rules usual`."""
    adds: ClassVar[bool] = False
    """Adds what it finds to the mask, instead of removing it."""
    on_dark: ClassVar[bool] = False
    """Understands slides with a black ground (fluorescence), too."""
    version: ClassVar[int] = 1
    """Counts up when the same parameters give another mask: stores remember it."""

    def __post_init__(self) -> None:
        for parameter in fields(self):  # type: ignore[arg-type]
            value, (low, high) = getattr(self, parameter.name), parameter.metadata["limits"]
            if not low <= value <= high:
                raise UserError(f"--{self.name}.{parameter.name} {value:g}: expected {low:g} to {high:g}")

    def find(self, overview: Overview) -> Mask:
        """The pixels of the coarse copy at which there is what the rule looks for."""
        raise NotImplementedError


_PALE_NOISES = 4.0
"""Deviations of background's own noise."""
_PALE_MOST = 1 << 20
"""Pixels of background that are looked at: more tell nothing more."""


@dataclass(frozen=True)
class Pale(Rule):
    """Parameters of the rule `pale`: fat, mucus and weakly stained tissue, which Otsu's threshold leaves out."""

    name: ClassVar[str] = "pale"
    looks_for: ClassVar[str] = "pale tissue that the threshold left out: it is put in"
    colour: ClassVar[tuple[int, int, int]] = (0, 150, 220)
    adds: ClassVar[bool] = True

    stain: float = within(4.0, 1, 100)
    """Grey levels between the strongest and the weakest channel, more than background has."""
    smooth: float = within(12.0, 0, 500)
    """Micrometres over which the colour is averaged before it is compared."""
    smallest: float = within(0.03, 0, 100)
    """Square millimetres of the smallest piece; what is smaller is dust."""

    def find(self, overview: Overview) -> Mask:
        """Tissue that is not in the mask."""
        pixels = overview.pixels
        high = np.maximum(np.maximum(pixels[..., 0], pixels[..., 1]), pixels[..., 2])
        low = np.minimum(np.minimum(pixels[..., 0], pixels[..., 1]), pixels[..., 2])
        stain = gaussian_filter((high - low).astype(np.float32), overview.pixels_of(self.smooth))
        background = stain[~near(overview.mask, 8)]
        if not background.size:
            return np.zeros_like(overview.mask)
        background = background[:: -(-background.size // _PALE_MOST)]
        # The darker half of what is left: background is most of it, and pale tissue the tail above.
        usual = float(np.quantile(background, 0.25))
        noise = 1.4826 * float(np.median(np.abs(background[background <= np.median(background)] - usual)))
        found = stain > usual + max(self.stain, _PALE_NOISES * noise)
        found = joined(found, overview.pixels_of(40))
        # A rim around what is in the mask is its blurred border, not tissue of its own.
        pieces = large(found & ~near(overview.mask, 3), overview.least(self.smallest) / 4)
        return large(near(pieces, 3) & found & ~overview.mask, overview.least(self.smallest))


_PEN_BLUE = 1.15
"""Tissue takes more green light than red: haematoxylin as much of both, eosin nearly no red. Blue, green and black
felt pens take more red than green."""
_PEN_RED = 0.75
"""Red pens take all blue and green light and no red. Eosin lets blue pass, and DAB and melanin take red, too."""
_PEN_NO_RED = 0.25
_PEN_LESS_BLUE, _PEN_LESS_RED, _PEN_DARK = 0.8, 0.6, 0.5
"""The same over tissue: only where it touches a mark that is beyond doubt."""
_PEN_BLACK = 0.8
"""Black takes all colours alike, to within a fifth, and takes four fifths of the light or more."""
_PEN_NO_LIGHT = 0.7
_PEN_LESS_BLACK, _PEN_DARKER = 0.6, 0.9


@dataclass(frozen=True)
class Pen(Rule):
    """Parameters of the rule `pen`: black by its darkness, blue, green and red by what they do to red light."""

    name: ClassVar[str] = "pen"
    looks_for: ClassVar[str] = "pen marks: black, blue, green, red"
    colour: ClassVar[tuple[int, int, int]] = (220, 30, 200)
    usual: ClassVar[bool] = True

    density: float = within(0.25, 0.05, 2)
    """The optical density, in the colour it takes most of, from which on a mark counts as one."""
    smallest: float = within(0.03, 0, 100)
    """Square millimetres of the smallest mark: single cells with brown or black pigment are smaller."""
    grow: float = within(24.0, 0, 1000)
    """Micrometres around a mark that go with it: its border is pale."""

    def find(self, overview: Overview) -> Mask:
        """Pen marks on tissue or what passes for it."""
        red, green, blue = density(overview.pixels[overview.mask]).T
        most = np.maximum(np.maximum(red, green), blue)
        seen = most >= self.density
        is_blue = red >= _PEN_BLUE * green
        is_red = (blue >= _PEN_RED * green) & (red <= _PEN_NO_RED * blue)
        is_black = (np.minimum(np.minimum(red, green), blue) >= _PEN_BLACK * most) & (most >= _PEN_NO_LIGHT)
        sure = is_blue | is_red | is_black
        # Over tissue its colour is added: less clear, and next to what is clear.
        darkest = np.minimum(np.minimum(red, green), blue)
        likely = (blue >= _PEN_LESS_RED * green) & (red <= 2 * _PEN_NO_RED * blue) & (most >= _PEN_DARK)
        likely |= ((red >= _PEN_LESS_BLUE * green) & (most >= _PEN_DARK)) | (
            (darkest >= _PEN_LESS_BLACK * most) & (most >= _PEN_DARKER)
        )
        marks, around = np.zeros_like(overview.mask), np.zeros_like(overview.mask)
        marks[overview.mask] = seen & sure
        around[overview.mask] = seen & (sure | likely)
        marks = large(joined(marks, overview.pixels_of(30)), overview.least(self.smallest / 4))
        marks = binary_propagation(marks, mask=joined(around, overview.pixels_of(20)) | marks)
        whole = large(marks, overview.least(self.smallest))
        return near(whole, round(overview.pixels_of(self.grow))) & overview.mask


_EDGE_GREY = 0.3
"""Fraction by which the weakest channel may be below the strongest; with stains it is half or more."""
_EDGE_SEEN, _EDGE_BLACK = 0.06, 0.7
"""Optical densities: from the first on something is there, and from the second on it is a black pen."""
_EDGE_SLIM = 6.0
"""Least length over width."""
_EDGE_MARGIN = 4
"""Pixels by which the mask is wider than what it is about."""


@dataclass(frozen=True)
class Edge(Rule):
    """Parameters of the rule `edge`: lines and rings that take all colours alike, and thin long pieces."""

    name: ClassVar[str] = "edge"
    looks_for: ClassVar[str] = "edges of cover glass and rims of bubbles"
    colour: ClassVar[tuple[int, int, int]] = (110, 70, 20)

    widest: float = within(120.0, 8, 2000)
    """Micrometres of the widest line."""
    shortest: float = within(0.5, 0.05, 100)
    """Millimetres of the shortest line."""
    grow: float = within(40.0, 0, 1000)
    """Micrometres around a line that go with it: lenses give it coloured seams."""

    def find(self, overview: Overview) -> Mask:
        """Lines that pass for tissue."""
        # Looked for on background too: a line whose half is in the mask is as long as it is.
        taken = density(overview.pixels)
        most, least = taken.max(2), taken.min(2)
        lines = (most > _EDGE_SEEN) & (most < _EDGE_BLACK) & (most - least < _EDGE_GREY * most)
        length, widest = overview.pixels_of(1000 * self.shortest), overview.pixels_of(self.widest)
        found = slender(lines, widest, length, _EDGE_SLIM) & _longer(lines, length)
        # With a coloured seam the mask takes them for tissue: thin long pieces by themselves, wider by its margin.
        found |= slender(overview.mask, widest + 2 * _EDGE_MARGIN, length, _EDGE_SLIM) & _longer(overview.mask, length)
        return near(found, round(overview.pixels_of(self.grow))) & overview.mask


def _longer(mask: Mask, length: float) -> Mask:
    """The pieces whose height or width is at least a length: a line has one, a ring both."""
    labels, _ = label(mask, np.ones((3, 3)))
    found = np.zeros_like(mask)
    for number, place in enumerate(find_objects(labels), start=1):
        if max(part.stop - part.start for part in place) >= length:
            found[place] |= labels[place] == number
    return found


_BLUR_FINE, _BLUR_COARSE = 1.0, 6.0
"""Standard deviations in pixels of the finer copy: detail is what the first removes, structure what lies between."""
_BLUR_BLOCK = 128
"""Side of what is looked at at a time, in pixels of the mask."""
_BLUR_MARGIN = 16
"""Pixels of the mask beyond a block that the filters see."""
_BLUR_NEAR = 16.0
"""Micrometres over which detail is compared with structure."""
_BLUR_FLAT = 1.0
"""Grey levels of structure below which a place is too even to tell whether it is sharp."""


@dataclass(frozen=True)
class Blur(Rule):
    """Parameters of the rule `blur`: detail in proportion to structure, so that pale tissue is not taken for blurred.

    It sees what is out of focus by about a pixel of its copy of the slide or more.
    """

    name: ClassVar[str] = "blur"
    looks_for: ClassVar[str] = "tissue out of focus"
    colour: ClassVar[tuple[int, int, int]] = (250, 150, 0)
    usual: ClassVar[bool] = True
    on_dark: ClassVar[bool] = True

    mpp: float = within(2.0, 0.25, 16)
    """Micrometres along a pixel in which detail is looked for; finer takes longer and sees weaker blur."""
    sharpness: float = within(0.42, 0.01, 1)
    """Detail over structure below which tissue counts as blurred; sharp tissue has 0.5 and more."""
    window: float = within(40.0, 8, 2000)
    """Micrometres over which the proportion is averaged."""
    smallest: float = within(0.03, 0, 100)
    """Square millimetres of the smallest blurred place."""

    def find(self, overview: Overview) -> Mask:
        """Tissue that is blurred."""
        detail, structure = _energies(overview)
        close = overview.pixels_of(_BLUR_NEAR)
        area = gaussian_filter(overview.mask.astype(np.float32), close) + 1e-6
        detail, structure = (gaussian_filter(energy, close) / area for energy in (detail, structure))
        told = overview.mask & (structure > _BLUR_FLAT**2)
        ratio = np.zeros_like(detail)
        ratio[told] = np.log(np.maximum(detail[told], 1e-6) / structure[told]) / 2
        # Of logarithms, or a sharp place would outweigh all that is blurred beside it.
        spread = overview.pixels_of(self.window)
        mean = gaussian_filter(ratio, spread) / (gaussian_filter(told.astype(np.float32), spread) + 1e-6)
        blurred = (mean < np.log(self.sharpness)) & told
        found = large(joined(blurred, spread) & overview.mask, overview.least(self.smallest))
        # Near its border the mean is that of both sides, and seems sharp.
        return near(found, round(spread / 2)) & overview.mask


def _energies(overview: Overview) -> tuple[Values, Values]:
    """Squares of detail and of structure, averaged over each pixel of the mask, and 0 off tissue."""
    detail, structure = (np.zeros(overview.mask.shape, np.float32) for _ in range(2))
    height, width = overview.mask.shape
    for top in range(0, height, _BLUR_BLOCK):
        for left in range(0, width, _BLUR_BLOCK):
            bottom, right = min(top + _BLUR_BLOCK, height), min(left + _BLUR_BLOCK, width)
            if not overview.mask[top:bottom, left:right].any():
                continue  # nothing of background is read
            first, last = max(0, top - _BLUR_MARGIN), min(height, bottom + _BLUR_MARGIN)
            begin, end = max(0, left - _BLUR_MARGIN), min(width, right + _BLUR_MARGIN)
            fine, coarse = _squares(overview.finer(first, begin, last - first, end - begin))
            inner = np.s_[top - first : bottom - first, left - begin : right - begin]
            detail[top:bottom, left:right] = _averaged(fine, overview.times)[inner]
            structure[top:bottom, left:right] = _averaged(coarse, overview.times)[inner]
    return detail * overview.mask, structure * overview.mask


def _squares(pixels: Pixels) -> tuple[Values, Values]:
    grey = pixels.mean(axis=2, dtype=np.float32)
    smooth = gaussian_filter(grey, _BLUR_FINE)
    return (grey - smooth) ** 2, (smooth - gaussian_filter(grey, _BLUR_COARSE)) ** 2


def _averaged(values: Values, times: int) -> Values:
    height, width = values.shape[0] // times, values.shape[1] // times
    return values.reshape(height, times, width, times).mean((1, 3))


_FOLD_ALIKE = 1.4
"""Ratio of red to green and blue that a fold may have: dense nuclei take more of red, one more layer of all."""
_FOLD_LEAST = 0.02
"""Optical density of what counts as tissue around a fold."""


@dataclass(frozen=True)
class Fold(Rule):
    """Parameters of the rule `fold`: two layers of tissue take twice the light of one, along a line."""

    name: ClassVar[str] = "fold"
    looks_for: ClassVar[str] = "folded tissue"
    colour: ClassVar[tuple[int, int, int]] = (210, 20, 20)

    darker: float = within(1.4, 1, 10)
    """The optical density of a fold over that of the tissue around it."""
    around: float = within(200.0, 20, 5000)
    """Micrometres over which the tissue around it is averaged."""
    widest: float = within(150.0, 10, 5000)
    """Micrometres of the widest fold; what is wider is dense tissue."""
    slimness: float = within(3.0, 1, 100)
    """Least length of a fold over its width."""
    smallest: float = within(0.01, 0, 100)
    """Square millimetres of the smallest fold."""

    def find(self, overview: Overview) -> Mask:
        """Tissue that is folded."""
        spread = overview.pixels_of(self.around)
        area = gaussian_filter(overview.mask.astype(np.float32), spread) + 1e-6
        times = []
        for channel in range(3):
            # A few pixels' mean: folds are even, and a row of nuclei is not one.
            dark = gaussian_filter(density(overview.pixels[..., channel]) * overview.mask, overview.pixels_of(10))
            times.append(dark / (gaussian_filter(dark, spread) / area + _FOLD_LEAST))
        red, least = times[0], np.minimum(times[1], times[2])
        folded = (least > self.darker) & (red < _FOLD_ALIKE * least) & overview.mask
        found = slender(
            joined(folded, overview.pixels_of(30)),
            overview.pixels_of(self.widest),
            overview.least(self.smallest),
            self.slimness,
        )
        return near(found, 1) & overview.mask


def slender(mask: Mask, widest: float, least: float, slimness: float) -> Mask:
    """The pieces that are nowhere wider than `widest`, have `least` pixels, and are `slimness` times as long as wide.

    A piece of the width 2r and the length l has about 2rl pixels, so its length is told by its area.
    """
    labels, _ = label(mask, np.ones((3, 3)))
    found = np.zeros_like(mask)
    for number, place in enumerate(find_objects(labels), start=1):
        piece = labels[place] == number
        area = np.count_nonzero(piece)
        if area < least:
            continue
        width = 2 * float(distance_transform_edt(np.pad(piece, 1)).max()) - 1
        if width <= widest and area >= slimness * width**2:
            found[place] |= piece
    return found


def joined(mask: Mask, gap: float) -> Mask:
    """The mask with gaps of up to this many pixels closed."""
    reach = round(gap / 2)
    if reach < 1:
        return mask
    wide = np.pad(mask, reach)
    inner = slice(reach, -reach)
    return ~near(~near(wide, reach), reach)[inner, inner]


RULES: tuple[type[Rule], ...] = (Pale, Pen, Edge, Blur, Fold)
"""All rules, in the order in which they are applied."""

GROUPS = {
    "none": (),
    "usual": tuple(rule.name for rule in RULES if rule.usual),
    "all": tuple(rule.name for rule in RULES),
}
"""Presets of rules."""


def choose(words: str, rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """The rules of a comma-separated list, in the order of the table.

    Args:
        words: Names of rules, or none, usual or all.
        rules: All rules there are; those with parameters of their own have to be asked for.
    """
    names = GROUPS.get(words.strip())
    if names is None:
        names = tuple(word.strip() for word in words.split(",") if word.strip() not in ("", "none"))
    known = GROUPS["all"]
    for name in names:
        if name not in known:
            raise UserError(f"--rules {words}: {name!r} is no rule; there are {', '.join(known)}, usual, all and none")
    for rule in rules:
        if rule.name not in names and rule != type(rule)():
            raise UserError(f"--{rule.name}.* is given, and the rule is not; add it: --rules {words},{rule.name}")
    return tuple(sorted((rule for rule in rules if rule.name in names), key=lambda rule: known.index(rule.name)))


def finest(rules: Sequence[Rule]) -> float:
    """Micrometres along a pixel of the finest copy of a slide that a rule asks for."""
    return min([getattr(rule, "mpp", math.inf) for rule in rules], default=math.inf)


def record_of(rules: Sequence[Rule]) -> dict[str, Any]:
    """All of rules that decides a mask: kept in stores."""
    return {rule.name: {"version": rule.version, **asdict(rule)} for rule in rules}  # type: ignore[call-overload]


def apply_rules(rules: Sequence[Rule], tissue: TissueMask, overview: Overview) -> TissueMask:
    """The mask with what rules add and without what they take out.

    Each rule looks at what those before it have left, so that nothing is counted twice. Crumbs that a rule leaves go
    with what it took.

    Args:
        rules: The rules, in order.
        tissue: The mask so far.
        overview: The slide; its mask is not looked at.
    """
    mask = tissue.mask
    found: dict[str, Mask] = {}
    dark = is_dark(overview.pixels)
    for rule in rules:
        if dark and not rule.on_dark:
            continue
        here = rule.find(replace(overview, mask=mask))
        if rule.adds:
            found[rule.name] = here & ~mask
            mask = mask | here
        elif here.any():
            left = without_dust(mask & ~here)
            found[rule.name] = mask & ~left
            mask = left
        else:
            found[rule.name] = here
    return replace(tissue, mask=mask, found=found)
