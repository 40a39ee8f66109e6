"""A boundary that a tile reads piece by piece; see [Note: pieces] in `rules.pieces`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.ops import Pieces
from lightning_plugin.program.pieces import Strip
from lightning_plugin.residency.boundary import Boundary

#: So many pieces tell a rehearsal what all need: the first, which makes sums, one that is added, and one after that.
TELLING = 3


def in_pieces(
    handle: Boundary, strip: Strip, box: Box, count: int, give: Callable[[Box, Tensor], None] | None = None
) -> Pieces:
    """A box of a boundary in so many pieces; ``give`` takes the gradient of each."""
    boxes, ends = strip.boxes(box, count), tuple(end * strip.inner for end in strip.ends(count))
    if handle.home.courier.stand is not None:
        ends = ends[: TELLING + 1]

    def read(piece: int) -> Tensor:
        return handle.read(boxes[piece]).detach()

    def pull(piece: int, gradient: Tensor) -> None:
        assert give is not None
        give(boxes[piece], gradient)

    token = torch.zeros((), device=handle.device, requires_grad=give is not None)
    return Pieces(ends, read, None if give is None else pull, token)
