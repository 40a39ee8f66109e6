"""How pixels lie in memory: they are channel, y, x to everybody, and where they lie is what the decoder makes.

[order] JPEG and most readers make the three bytes of a pixel side by side, a store of planes makes planes. Taking
pixels apart costs ten times what copying them costs, a third of decoding them, and a convolution is faster on channels
that lie last; so they are handed on in the order in which they come. Pixels are the same in either order; every array
says by its strides which one it has, and all tiles of a source have the same one.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Order = Literal["planes", "pixels"]
"""The bytes of a channel side by side, or those of a pixel."""


def room(order: Order, *shape: int, memory: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """An array (..., channel, y, x) of bytes with anything in it, in an order; in memory of that size if that is given.

    Its strides are those that PyTorch gives such a tensor, also along an axis of one position.
    """
    *lead, channels, height, width = shape
    lies = shape if order == "planes" else (*lead, height, width, channels)
    array = np.empty(lies, np.uint8) if memory is None else memory.reshape(lies)
    return array if order == "planes" else np.moveaxis(array, -1, -3)


def is_by_pixels(array: NDArray[np.uint8]) -> bool:
    """Whether the bytes of a pixel of an array (channel, y, x) lie side by side."""
    return array.strides[0] == 1 and array.shape[0] > 1
