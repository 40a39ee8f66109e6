"""Facts of a TIFF: the size of a pixel, the objective, the names of its channels; and the image that is read."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tifffile
from numpy.typing import NDArray

from wsi_trainer.errors import SlideError, UnsupportedSlide
from wsi_trainer.io.untrusted import BrokenXml, Unreadable, parse_xml
from wsi_trainer.slide.formats.base import (
    MICROMETRES,
    WHITE,
    Pixels,
    Range,
    ReadOptions,
    check_bits,
    check_decoded,
    check_size,
    choose_channel,
    describe_channels,
    is_plausible,
    on_background,
    to_bytes,
)


@dataclass(frozen=True)
class PixelSize:
    """Micrometres per pixel, y and x; or what the file says instead, where that is no size."""

    mpp: tuple[float, float] | None = None
    unreadable: str | None = None


def number(text: str) -> float | None:
    """A number as vendors write them, also with a decimal comma; None for what is none."""
    text = text.strip()
    if re.fullmatch(r"[+-]?\d+,\d+", text):
        text = text.replace(",", ".")
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def pixel_size(tif: tifffile.TiffFile) -> PixelSize:
    """The size of a pixel."""
    if tif.is_svs:
        return _svs_size(description(tif))
    if tif.is_ome and (size := _ome_size(tif.ome_metadata or "")) != PixelSize():
        return size
    return _tagged_size(tif)


def _tagged_size(tif: tifffile.TiffFile) -> PixelSize:
    """The size of a pixel in the tags of the first page."""
    page = tif.pages.first
    unit = {2: 25400.0, 3: 10000.0}.get(int(page.resolutionunit))
    x, y = page.resolution
    return PixelSize((unit / y, unit / x)) if unit and x > 0 and y > 0 else PixelSize()


_DIFFERENT = 1.05
"""Ratio from which on two sizes of a pixel contradict each other."""


def contradiction(tif: tifffile.TiffFile, used: PixelSize) -> str:
    """A sentence on another size of a pixel that a file says too; empty where there is none, or none is plausible."""
    if used.mpp is None:
        return ""
    written = [("its tags say", _tagged_size(tif).mpp)]
    if tif.is_svs:
        values = [number(text) for text in re.findall(r"\bMPP\s*=([^|\r\n]*)", description(tif))[1:]]
        written += [("a further MPP says", (value, value)) for value in values if value is not None]
    for words, size in written:
        if size is None or not all(map(is_plausible, (*size, *used.mpp))):
            continue
        if any(max(a, b) > _DIFFERENT * min(a, b) for a, b in zip(size, used.mpp)):
            return (
                f"it contradicts itself about the size of a pixel: {used.mpp[1]:g} µm is used, and {words} "
                f"{size[1]:g} µm; give the right one in the column mpp"
            )
    return ""


def _svs_size(text: str) -> PixelSize:
    found = _svs_field(text, "MPP")
    if found is None:
        return PixelSize()
    value = number(found)
    return PixelSize(unreadable=f"MPP = {found[:40]}") if value is None else PixelSize((value, value))


def _svs_field(text: str, name: str) -> str | None:
    found = re.search(rf"\b{name}\s*=([^|\r\n]*)", text)
    return found[1].strip() if found else None


def _ome_size(xml: str) -> PixelSize:
    for pixels in _elements(xml, "Pixels"):
        if not {"PhysicalSizeX", "PhysicalSizeY"} & pixels.keys():
            continue
        sizes = []
        for axis in "YX":
            text, unit = pixels.get(f"PhysicalSize{axis}", ""), pixels.get(f"PhysicalSize{axis}Unit", "µm")
            value = number(text)
            if value is None or unit not in MICROMETRES:
                return PixelSize(unreadable=f"PhysicalSize{axis} = {text[:40]} {unit[:40]}".rstrip())
            sizes.append(value * MICROMETRES[unit])
        return PixelSize((sizes[0], sizes[1]))
    return PixelSize()


def power(tif: tifffile.TiffFile) -> float | None:
    """The power of the objective."""
    if tif.is_svs:
        return number(_svs_field(description(tif), "AppMag") or "")
    if tif.is_ome:
        for objective in _elements(tif.ome_metadata or "", "Objective"):
            return number(objective.get("NominalMagnification", ""))
    return None


def channel_names(tif: tifffile.TiffFile) -> list[str]:
    """The names of the channels of the first image of an OME-TIFF; empty where there are none."""
    if not tif.is_ome:
        return []
    found = _all(tif.ome_metadata or "")
    first = next((place for place, (_, tag, _) in enumerate(found) if tag == "Pixels"), None)
    if first is None:
        return []
    inside = takewhile(lambda element: element[0] > found[first][0], found[first + 1 :])
    return [its.get("Name", "") for depth, tag, its in inside if tag == "Channel" and depth == found[first][0] + 1]


def ome_planes(tif: tifffile.TiffFile) -> int:
    """The number of planes of samples of the first image of an OME-TIFF; they may lie in several files."""
    for pixels in _elements(tif.ome_metadata or "", "Pixels") if tif.is_ome else ():
        sizes = [number(pixels.get(f"Size{axis}", "1")) or 1 for axis in "CZT"]
        return int(math.prod(sizes))
    return 0


def description(tif: tifffile.TiffFile) -> str:
    """The text of the first page."""
    text: object = tif.pages.first.description
    return text if isinstance(text, str) else ""


def _elements(xml: str, name: str) -> list[dict[str, str]]:
    """The attributes of all elements of this name, in any namespace."""
    return [its for *_, tag, its in _all(xml) if tag == name]


def _all(xml: str) -> list[tuple[int, str, dict[str, str]]]:
    """Depth, name and attributes of every element in a namespace, in order."""
    found: list[tuple[int, str, dict[str, str]]] = []
    depth = 0

    def start(tag: str, its: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        space, _, name = tag.rpartition("}")
        if space:
            found.append((depth, name, its))

    def end(tag: str) -> None:
        nonlocal depth
        depth -= 1

    try:
        parse_xml(xml, "OME-XML", start, end, namespaces=True)
    except BrokenXml:  # tifffile reads the pages of such a file, too; they say nothing of sizes
        return []
    return found


def open_tiff(path: Path, file: BinaryIO, name: str) -> tifffile.TiffFile:
    """An open TIFF whose images all lie in this file.

    tifffile opens every file that OME-XML names as the place of pixels, wherever that lies and whatever it is. It is
    given a name that is not the file's own: it would take one that is called .ndpi for an NDPI.

    Raises:
        SlideError: Its OME-XML declares entities, or says that pixels lie in another file.
    """
    logging.getLogger("tifffile").addHandler(_SILENT)  # what it says of a damaged file is an error of ours, or nothing
    tif = tifffile.TiffFile(file, name=name)
    if not len(tif.pages) or not tif.is_ome:
        return tif
    xml = description(tif)
    try:
        named = _named_files(xml)
    except BrokenXml:  # tifffile takes the pages as they come, and looks at no name
        return tif
    except Unreadable as error:
        raise SlideError(path, f"its OME-XML {error.reason}") from error
    if others := [name for name in named if name.lower() != path.name.lower()]:
        raise SlideError(
            path,
            f"a part of an image: its OME-XML says that pixels lie in {others[0][:80]!r}, and other files are not "
            "opened. Save the image as one file; one that was renamed needs the name again that it was written under",
        )
    if not named:
        return tif
    file.seek(0)
    return tifffile.TiffFile(file, name=name, omexml=_UUID.sub("", xml))


_SILENT = logging.NullHandler()
_UUID = re.compile(r"<((?:[\w.-]+:)?UUID)\b[^>]*?(?:/>|>.*?</\1\s*>)", re.DOTALL)


def _named_files(xml: str) -> list[str]:
    """The files that OME-XML names as the place of pixels, other than by its own identifier."""
    own, inside, found = "", False, list[tuple[str, list[str]]]()

    def start(tag: str, its: dict[str, str]) -> None:
        nonlocal own, inside
        name = tag.rpartition("}")[2]
        own = its.get("UUID", "") if name == "OME" else own
        inside = name == "UUID"
        if inside:
            found.append((its.get("FileName", ""), []))

    def end(tag: str) -> None:
        nonlocal inside
        inside = False

    def text(part: str) -> None:
        if inside:
            found[-1][1].append(part)

    parse_xml(xml, "OME-XML", start, end, namespaces=True, text=text)
    return [name for name, parts in found if not own or "".join(parts) != own]


# JPEG 2000 of Aperio is left to OpenSlide: tifffile returns its YCbCr variant unconverted.
_CODECS = {1, 5, 7, 8, 32773, 32946, 34712, 50000, 50001, 50002, 34926, 34927}
_GREY, _RGB, _YCBCR = 1, 2, 6
_COLOURS = {0: 1, _GREY: 1, _RGB: 3, 3: 1, 5: 4, _YCBCR: 3, 8: 3, 9: 3, 10: 3}
_UNSPECIFIED, _ASSOCIATED, _UNASSOCIATED = 0, 1, 2
# Axes along which pages are channels; tifffile names pages in a row that nothing explains I or Q.
_CHANNELS = {"C", "I", "Q"}


@dataclass(frozen=True)
class Choice:
    """The image of a TIFF.

    Attributes:
        pages: one for each level.
        sample: the only sample of a pixel that is taken; None takes grey or RGB.
        alpha: how the last sample of a pixel says that it is transparent.
        scale: the range of values that become 0 to 255; None where they are bytes.
        changes: what is done to the file's values.
    """

    pages: tuple[Any, ...]
    sample: int | None
    alpha: int | None
    scale: Range | None
    changes: tuple[str, ...]

    @property
    def is_plain(self) -> bool:
        """True if decoded tiles are the pixels, as they are."""
        return self.sample is None and self.alpha is None and self.scale is None

    def pixels(self, path: Path, segment: NDArray[Any]) -> Pixels:
        """The pixels (y, x, 1 or 3) of a decoded tile (y, x, sample)."""
        if self.sample is not None:
            segment = segment[..., self.sample : self.sample + 1]
        if self.scale is not None:
            segment = to_bytes(segment, self.scale, has_alpha=self.alpha is not None)
        pixels: Pixels = segment
        return pixels if self.alpha is None else _opaque(path, pixels, self.alpha)


def choose(path: Path, tif: tifffile.TiffFile, options: ReadOptions) -> Choice:
    """The image of a TIFF that these options mean.

    Raises:
        SlideError: It is not one flat image of grey or RGB, and no option says what to take of it.
        UnsupportedSlide: It is, in an encoding that is left to another reader.
    """
    series = tif.series[0]
    _check_others(path, tif)
    pages, picked, names = _pages(path, tif, options)
    first = pages[0].keyframe
    sample, alpha = _samples(path, first, None if picked else options.channel, names)
    few_bits = first.dtype is None or first.bitspersample < 8  # what unpacks to bytes that are not full
    scale = None if few_bits else check_bits(path, np.dtype(first.dtype), options)
    for page in pages:
        if (page.keyframe.dtype, page.keyframe.samplesperpixel) != (first.dtype, first.samplesperpixel):
            raise SlideError(path, "its levels have different kinds of pixels")
    if scale is None:
        _check_encoding(path, first)
    elif first.photometric not in (_GREY, _RGB):
        raise SlideError(path, f"pixels are {first.dtype} and colours are stored as {_name(first.photometric)}")
    changes = []
    if options.channel is not None:
        changes.append(f"channel {options.channel} of {_count(series, first)}")
    if scale is not None:
        changes.append(f"{first.dtype} {scale} to 8 bits")
    if alpha is not None:
        changes.append("transparent parts in the background's colour")
    return Choice(tuple(pages), sample, alpha, scale, tuple(changes))


def _check_others(path: Path, tif: tifffile.TiffFile) -> None:
    """Refuses a file whose first image is not the largest: which one is meant?"""
    size = _area(tif.series[0].levels[0])
    for number, series in enumerate(tif.series[1:], start=2):
        if _area(series.levels[0]) > size:
            raise SlideError(path, f"its image {number} is larger than the first; save the one you mean as a file")


def _area(series: Any) -> int:
    page = series.keyframe
    return int(page.imagelength) * int(page.imagewidth)


def _pages(path: Path, tif: tifffile.TiffFile, options: ReadOptions) -> tuple[list[Any], bool, list[str]]:
    """One page for each level, whether a channel was chosen by that, and the channels' names."""
    series, names = tif.series[0], channel_names(tif)
    stack = {axis: size for axis, size in zip(series.axes, series.shape) if axis not in "YXS" and size > 1}
    there = int(np.prod([size for axis, size in zip(series.axes, series.shape) if axis not in "YX"]))
    if ome_planes(tif) > there:
        raise SlideError(
            path, f"it lists {ome_planes(tif)} planes, of which {there} are in this file: a part of an image"
        )
    if not stack:
        return [_only(path, level) for level in series.levels], False, names
    (axis, count), *more = stack.items()
    if more or axis not in _CHANNELS:
        planes = int(np.prod(list(stack.values())))
        raise SlideError(path, f"a stack of {planes} planes (axes {series.axes}); expected one flat image")
    if options.channel is None:
        kind = "channels" if axis == "C" else "pages of the same size"
        raise SlideError(
            path, f"a stack of {count} {kind}; choose one with preprocess --channel ({describe_channels(names, count)})"
        )
    number = choose_channel(path, options.channel, names, count)
    chosen = []
    for level in series.levels:
        if len(level.pages) != count or level.pages[number] is None:
            raise SlideError(path, f"has {len(level.pages)} pages of {count} channels; expected one page each")
        chosen.append(level.pages[number])
    return chosen, True, names


def _only(path: Path, level: Any) -> Any:
    pages = [page for page in level.pages if page is not None]
    if len(pages) != 1:
        raise SlideError(path, f"an image of {len(pages)} pages (axes {level.axes}) in this file; expected one")
    return pages[0]


def _samples(path: Path, page: Any, wanted: str | None, names: list[str]) -> tuple[int | None, int | None]:
    """The one sample to take, if not all, and what the last one says about transparency."""
    count, colours = int(page.samplesperpixel), _COLOURS.get(int(page.photometric), 0)
    extra = (*map(int, page.extrasamples), _UNSPECIFIED)[0]
    if page.shaped[1] != 1:
        raise SlideError(path, f"a volume of shape {page.shape}; expected one flat image")
    if wanted is not None and colours > 1:
        raise SlideError(path, "a colour image; --channel has nothing to choose in it")
    if wanted is not None:
        sample = choose_channel(path, wanted, names, count)
        return (sample if count > 1 else None), None
    if count == colours:
        return None, None
    if count == colours + 1 and colours in (1, 3) and (extra in (_ASSOCIATED, _UNASSOCIATED) or colours == 3):
        return None, extra
    if colours == 1:
        there = describe_channels(names, count)
        raise SlideError(
            path, f"{count} channels that are not marked as RGB; choose one with preprocess --channel ({there})"
        )
    stored = _name(page.photometric)
    raise SlideError(
        path, f"{count} samples a pixel, stored as {stored}; expected grey or RGB, perhaps with transparency"
    )


def _check_encoding(path: Path, page: Any) -> None:
    """Leaves to other readers what is one flat image of bytes in an encoding that is not read here."""
    reason, change = None, ""
    if page.compression not in _CODECS:
        reason = (
            f"compression {_name(page.compression)} is not read through tifffile: save it with JPEG, LZW or Deflate"
        )
    elif page.bitspersample != 8:
        reason = f"pixels have {page.bitspersample} bits; expected 8"
    elif page.photometric not in (_RGB, _GREY) and not (page.photometric == _YCBCR and page.compression == 7):
        change = f"colours are stored as {_name(page.photometric)}"
        reason = f"{change}; expected RGB"
    if reason is None:
        return
    turned = orientation(page)
    if turned != 1:
        raise SlideError(path, f"{reason}, and other readers leave it turned (orientation {turned}); save it upright")
    raise UnsupportedSlide(path, reason, change)


def check_pages(path: Path, pages: tuple[Any, ...]) -> None:
    """Refuses pages of impossible sizes, and such whose tiles are not all listed."""
    for page in pages:
        key = page.keyframe
        check_size(path, key.imagelength, key.imagewidth)
        what = f"a {'tile' if key.is_tiled else 'strip'} of {'x'.join(map(str, key.chunks[:2]))} px"
        check_decoded(path, what, math.prod(map(int, key.chunks)) * np.dtype(key.dtype).itemsize)
        rows, columns = tile_size(key)
        needed = key.shaped[0] * -(-key.imagelength // rows) * -(-key.imagewidth // columns)
        places = [np.asarray(values) for values in (page.dataoffsets, page.databytecounts)]
        if min(map(len, places)) < needed:
            raise SlideError(path, f"broken TIFF: it needs {needed} tiles and lists {min(map(len, places))}")
        if any(values.dtype.kind not in "iu" for values in places):
            raise SlideError(path, "broken TIFF: the places of its tiles are no numbers")


def tile_size(page: Any) -> tuple[int, int]:
    """Rows and columns of a tile or a strip, of whatever samples."""
    rows, columns = page.chunks[-3:-1] if page.shaped[-1] > 1 else page.chunks[-2:]
    return rows, columns


def orientation(page: Any) -> int:
    """The orientation of the image, as TIFF counts it: 1 is upright."""
    tag = page.tags.get(274)
    value = tag.value if tag is not None else 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _count(series: Any, page: Any) -> int:
    stack = [size for axis, size in zip(series.axes, series.shape) if axis in _CHANNELS]
    return int(np.prod(stack)) * int(page.samplesperpixel)


def _name(value: Any) -> str:
    """The name of a code of TIFF, or its number where it has none; of what stands there instead, the beginning."""
    return " ".join(str(getattr(value, "name", value)).split())[:40]


def _opaque(path: Path, pixels: Pixels, kind: int) -> Pixels:
    """Pixels without their last sample, which says how much of the background shows."""
    colours, alpha = pixels[..., :-1], pixels[..., -1]
    if kind == _UNASSOCIATED:
        return on_background(colours, alpha, WHITE)
    if alpha.min(initial=255) == 255:
        return colours
    if (colours > alpha[..., None]).any():
        hint = "its colours are stronger than that allows; save it without the fourth channel"
        raise SlideError(path, f"a fourth channel that should say what is transparent does not: {hint}")
    return colours + (255 - alpha[..., None])  # the colours are those in front of black


def further_images(tif: tifffile.TiffFile) -> int:
    """The number of images in the file beside the first one that are neither its levels nor a scanner's pictures."""
    if tif.is_svs:
        return 0
    known = ("label", "macro", "thumbnail", "overview", "map")
    height, width = tif.series[0].keyframe.imagelength, tif.series[0].keyframe.imagewidth
    others = [series.keyframe for series in tif.series[1:] if not series.name.lower().startswith(known)]
    return sum(
        (not page.is_reduced and abs(page.imagelength * width - page.imagewidth * height) > 0.02 * width * height)
        or (page.imagelength, page.imagewidth) == (height, width)
        for page in others
    )  # fmt: skip
