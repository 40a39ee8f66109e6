"""Pieces of a mask, by their size and shape."""

from __future__ import annotations

import numpy as np
from scipy import ndimage

from wsi_trainer.slides.tissue import Mask, near


def large(mask: Mask, least: float) -> Mask:
    """The pieces of at least so many pixels; those that touch at a corner are one."""
    labels, _ = ndimage.label(mask, np.ones((3, 3)))
    keep = np.bincount(labels.reshape(-1)) >= least
    keep[0] = False
    return np.asarray(keep[labels])


def slender(mask: Mask, widest: float, least: float, slimness: float) -> Mask:
    """The pieces that are nowhere wider than `widest`, have `least` pixels, and are `slimness` times as long as wide.

    A piece of the width 2r and the length l has about 2rl pixels, so its length is told by its area.
    """
    labels, _ = ndimage.label(mask, np.ones((3, 3)))
    found = np.zeros_like(mask)
    for number, place in enumerate(ndimage.find_objects(labels), start=1):
        piece = labels[place] == number
        area = np.count_nonzero(piece)
        if area < least:
            continue
        width = 2 * float(ndimage.distance_transform_edt(np.pad(piece, 1)).max()) - 1
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
