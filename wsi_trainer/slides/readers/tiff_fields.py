"""What a TIFF says about itself: how large a pixel is, the objective, the names of its channels."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import takewhile

import tifffile

from wsi_trainer.foreign import Unreadable
from wsi_trainer.foreign.xml import parse_xml

# Micrometres in the units of lengths that OME knows; `pixel` and `reference frame` are none.
_PREFIXES = {
    "Y": 24, "Z": 21, "E": 18, "P": 15, "T": 12, "G": 9, "M": 6, "k": 3, "h": 2, "da": 1, "": 0, "d": -1, "c": -2,
    "m": -3, "µ": -6, "μ": -6, "u": -6, "n": -9, "p": -12, "f": -15, "a": -18, "z": -21, "y": -24,
}  # fmt: skip
MICROMETRES = {f"{prefix}m": float(f"1e{power + 6}") for prefix, power in _PREFIXES.items()} | {
    "\u00c5": 1e-4, "\u212b": 1e-4, "thou": 25.4, "mil": 25.4, "li": 25400 / 12, "in": 25400.0, "ft": 304800.0,
    "yd": 914400.0, "mi": 1.609344e9, "pt": 25400 / 72,
}  # fmt: skip


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
    """How large a pixel is."""
    if tif.is_svs:
        return _svs_size(description(tif))
    if tif.is_ome and (size := _ome_size(tif.ome_metadata or "")) != PixelSize():
        return size
    page = tif.pages.first
    unit = {2: 25400.0, 3: 10000.0}.get(int(page.resolutionunit))
    x, y = page.resolution
    return PixelSize((unit / y, unit / x)) if unit and x > 0 and y > 0 else PixelSize()


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
    """How many planes of samples the first image of an OME-TIFF has; they may lie in several files."""
    for pixels in _elements(tif.ome_metadata or "", "Pixels") if tif.is_ome else ():
        sizes = [number(pixels.get(f"Size{axis}", "1")) or 1 for axis in "CZT"]
        return int(math.prod(sizes))
    return 0


def description(tif: tifffile.TiffFile) -> str:
    """The text of the first page."""
    text = tif.pages.first.description
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
    except Unreadable:  # tifffile reads the pages of such a file, too; they say nothing of sizes
        return []
    return found
