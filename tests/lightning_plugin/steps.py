"""A training step as data: what goes in, which networks, and what is done in which order.

A `Step` says nothing of how it is run. `step_runs` interprets it in the two worlds of `step_worlds`, plain PyTorch and
the engine, and `step_judge` says what differs. Its repr is Python: paste it into ``faults(Step(...))``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["float64", "float32", "bfloat16", "autocast"]


@dataclass(frozen=True)
class Image:
    """``tensor``: in memory; ``leaf``: in memory, and its gradient is wanted; ``source``: read region by region, where
    the read of this number ``fails`` once."""

    side: tuple[int, int]
    content: str
    batch: int = 1
    kind: Literal["tensor", "leaf", "source"] = "tensor"
    fails: int | None = None


@dataclass(frozen=True)
class Network:
    """Layers; then ``edit`` on the map, each of ``pools`` of it, and ``small`` on each result (see `step_parts`).

    ``returns``: whether that is in the module's forward, or in the code around a module that returns a map. ``tied``:
    the first convolution's weight is the first network's, where it has the same shape. ``inside``: layers under
    `torch.utils.checkpoint`; or all parameters replaced by `torch.func.functional_call`. ``hook``: a forward hook that
    doubles the first layer's output. ``asks``: after the layers of these numbers, a value is asked for (see
    `step_parts.ASKS`), as checks, metrics and branches do.
    """

    layers: tuple[str, ...]
    pools: tuple[str, ...]
    edit: str = "nothing"
    small: str = "nothing"
    returns: Literal["vector", "map"] = "vector"
    tied: bool = False
    inside: Literal["nothing", "checkpoint", "functional_call"] = "nothing"
    hook: bool = False
    asks: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Call:
    """A network on an image; ``how``: without grad, with its parameters frozen for so long, in eval mode."""

    network: int
    image: int
    how: Literal["train", "no_grad", "frozen", "eval"] = "train"


@dataclass(frozen=True)
class Ask:
    """The number of one result of a call is asked for."""

    call: int
    part: int = 0


@dataclass(frozen=True)
class Backward:
    """The losses of some results, added up and pulled back. ``product``: the loss is that of two results' product."""

    terms: tuple[tuple[int, int], ...]
    retain: bool = False
    twice: bool = False
    product: bool = False


@dataclass(frozen=True)
class Drop:
    """The last reference to a call's results goes."""

    call: int


@dataclass(frozen=True)
class Statistics:
    """A network's running statistics are read, or reset."""

    network: int
    what: Literal["read", "reset"]


@dataclass(frozen=True)
class Change:
    """An image's tensor is changed in place, as a loader does that fills its buffer again."""

    image: int


@dataclass(frozen=True)
class Nudge:
    """A network's parameters are changed in place, as an optimizer does."""

    network: int


Action = Call | Ask | Backward | Drop | Statistics | Change | Nudge


@dataclass(frozen=True)
class Way:
    """How the engine runs it. ``lazy``: modules called with a LazyImage; ``tiled``: a TiledModule for each network,
    called with tensors (with a LazyImage where the image is a source); ``both``: TiledModules called with LazyImages.
    Grids of forward and backward, or a budget in bytes."""

    calls: Literal["lazy", "tiled", "both"] = "tiled"
    tiles: tuple[int, int] = (2, 3)
    backward_tiles: tuple[int, int] | None = None
    budget: int | None = None


@dataclass(frozen=True)
class Step:
    """``whole``: all weights are whole numbers, so that sums are exact in any order."""

    dtype: Dtype
    images: tuple[Image, ...]
    networks: tuple[Network, ...]
    actions: tuple[Action, ...]
    way: Way = Way()
    width: int = 4
    whole: bool = False
    seed: int = 0
