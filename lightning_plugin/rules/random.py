"""Dropout and random tensors.

Numbers for each element are functions of its position (`noise`): they equal PyTorch's in distribution. Numbers for each
channel are one small tensor, drawn in each step by PyTorch's own generator: they equal PyTorch's to the bit. So do
masks that the user's own code draws (stochastic depth).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.graph import Value
from lightning_plugin.layout import Layout
from lightning_plugin.ops import TileOp
from lightning_plugin.private import operator_name
from lightning_plugin.rules.channels import arguments
from lightning_plugin.rules.noise import Stream
from lightning_plugin.rules.pointwise import local
from lightning_plugin.rules.table import API, ATEN, Recorder

aten = torch.ops.aten

#: Negative of the value of elements that alpha dropout drops, before scaling: SELU's limit.
ALPHA = 1.7580993408473766


@dataclass(frozen=True)
class Positional(TileOp):
    """Operator that draws a random number for each element, from the key that it reads; tiles with equal inputs have
    different results."""

    kind: ClassVar[str] = "local"
    stream: Stream
    layout: Layout

    def need(self, box: Box) -> tuple[Box, ...]:
        return (box,)


@dataclass(frozen=True)
class Dropout(Positional):
    p: float

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        x = tiles[0]
        scale = 1 / (1 - self.p) if self.p < 1 else 0.0
        return x * self.stream.keep(vectors[0], self.p, self.layout, box) * scale


@dataclass(frozen=True)
class AlphaDropout(Positional):
    """Alpha dropout: sets elements to a value, and scales and shifts all, which keeps SELU's mean and variance."""

    p: float

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        x = tiles[0]
        keep = self.stream.keep(vectors[0], self.p, self.layout, box)
        return alpha_drop(x, keep.to(x.dtype), self.p)


def alpha_scale_and_shift(keep: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Return factor and summand of alpha dropout, in PyTorch's order of operations."""
    a = 1 / math.sqrt((ALPHA * ALPHA * p + 1) * (1 - p))
    return keep * a, (keep - 1) * (ALPHA * a) + ALPHA * a * p


@dataclass(frozen=True)
class RandomRelu(Positional):
    """Leaky ReLU with a random slope for each element."""

    lower: float
    upper: float

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        x = tiles[0]
        slope = self.stream.uniform(vectors[0], self.layout, box, x.dtype)
        slope.mul_(self.upper - self.lower).add_(self.lower)
        return x * slope.masked_fill_(x > 0, 1)


@dataclass(frozen=True)
class Noise(Positional):
    """Random tensor of a map's shape: ``scale`` times a number of the distribution, plus ``offset``."""

    distribution: str
    dtype: torch.dtype
    scale: float = 1.0
    offset: float = 0.0

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        draw = getattr(self.stream, self.distribution)
        return draw(vectors[0], self.layout, box, self.dtype).mul_(self.scale).add_(self.offset)


@dataclass(frozen=True)
class Bernoulli(Positional):
    """One with probability ``p``, or with the value of each element as its probability."""

    p: float | None
    dtype: torch.dtype

    def apply(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
        x = tiles[0]
        if self.p is not None:
            return self.stream.keep(vectors[0], 1 - self.p, self.layout, box).to(self.dtype)
        return (self.stream.uniform(vectors[0], self.layout, box, torch.float64) < x).to(self.dtype)


def emit_positional(
    rec: Recorder, op: type[Positional], x: Value, outs: Sequence[Tensor], *fields: Any, grad: bool = True
) -> Any:
    stream, key = Stream(rec.session.next_random_call()), rec.session.random_key(x.device)
    return rec.emit(op(stream, x.space, *fields), [x, key], outs, x.space, rec.name, grad=grad)


def dropout_arguments(func: Any, args: Any, kwargs: Any) -> tuple[Value, float, bool]:
    """Return input, p and training of a dropout function of `torch.nn.functional` or `torch`."""
    a = arguments(func, args, kwargs)
    return a["input"], a["p"], bool(a["training"] if "training" in a else a["train"])


def drops_nothing(p: float, training: bool) -> bool:
    """True if no element is dropped: PyTorch returns its input."""
    return not training or p == 0


@API.rule(F.dropout, torch.dropout, kind="local, random")
def dropout(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, p, training = dropout_arguments(func, args, kwargs)
    return NotImplemented if drops_nothing(p, training) else emit_positional(rec, Dropout, x, outs, p)


@API.rule(F.alpha_dropout, torch.alpha_dropout, kind="local, random")
def alpha_dropout(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, p, training = dropout_arguments(func, args, kwargs)
    if drops_nothing(p, training):
        return NotImplemented
    return emit_positional(rec, Dropout, x, outs, 1.0) if p == 1 else emit_positional(rec, AlphaDropout, x, outs, p)


def channel_mask(x: Value, p: float, lead: int) -> Callable[[], Tensor]:
    """Return a function that draws a tensor that is one with probability 1 - p, for each entry of the first ``lead``
    dimensions."""
    shape = [size if d < lead else 1 for d, size in enumerate(x.shape)]
    dtype, device = x.dtype, x.device
    return lambda: torch.empty(shape, dtype=dtype, device=device).bernoulli_(1 - p)


@API.rule(F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout, kind="local, random")
def feature_dropout(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Drop whole channels; an image without a batch has one lead dimension less."""
    x, p, training = dropout_arguments(func, args, kwargs)
    if drops_nothing(p, training):
        return NotImplemented
    lead = 1 if (func, len(x.shape)) in ((F.dropout1d, 2), (F.dropout3d, 4)) else 2
    mask = channel_mask(x, p, lead)
    return rec.decompose(torch.mul, x, rec.session.draw(lambda session: mask().div_(1 - p) if p < 1 else mask()))


@API.rule(F.feature_alpha_dropout, torch.feature_alpha_dropout, kind="local, random")
def feature_alpha_dropout(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    x, p, training = dropout_arguments(func, args, kwargs)
    if drops_nothing(p, training):
        return NotImplemented
    if p == 1:
        return rec.decompose(torch.mul, x, 0.0)
    mask = channel_mask(x, p, 2)
    return rec.decompose(alpha_drop, x, rec.session.draw(lambda session: mask()), p)


def alpha_drop(x: Tensor, keep: Tensor, p: float) -> Tensor:
    scale, shift = alpha_scale_and_shift(keep, p)
    return x * scale + shift


@API.rule(F.rrelu, torch.rrelu, kind="local, random")
def rrelu(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    a = arguments(func, args, kwargs)
    x = a["input"]
    if not a["training"]:
        return local(rec, F.leaky_relu, [x, (a["lower"] + a["upper"]) / 2], {}, outs[0], x.space, name="rrelu")
    return emit_positional(rec, RandomRelu, x, outs, a["lower"], a["upper"])


@ATEN.rule(aten.rand_like.default, aten.randn_like.default, kind="local, random")
def random_like(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    normal = operator_name(func) == "randn_like"
    if not outs[0].is_floating_point():
        return NotImplemented
    return emit_positional(rec, Noise, args[0], outs, "normal" if normal else "uniform", outs[0].dtype, grad=False)


@ATEN.rule(aten.uniform.default, aten.exponential.default, kind="local, random")
def random_fill(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """``x.uniform_()``, ``x.exponential_()``."""
    a = arguments(func, args, kwargs)
    if a["generator"] is not None or not a["self"].is_map:
        return NotImplemented
    if operator_name(func) == "exponential":
        return emit_positional(rec, Noise, a["self"], outs, "exponential", a["self"].dtype, 1 / a["lambd"], grad=False)
    return emit_positional(
        rec, Noise, a["self"], outs, "uniform", a["self"].dtype, a["to"] - a["from"], a["from"], grad=False
    )


@API.rule(Tensor.normal_, kind="local, random")
def normal(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    a = {"mean": 0.0, "std": 1.0} | dict(zip(("self", "mean", "std"), args, strict=False)) | kwargs
    if a.get("generator") is not None or not a["self"].is_map:
        return NotImplemented
    return emit_positional(rec, Noise, a["self"], outs, "normal", a["self"].dtype, a["std"], a["mean"], grad=False)


@ATEN.rule(aten.bernoulli.default, aten.bernoulli.p, kind="local, random")
def bernoulli(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    a = arguments(func, args, kwargs)
    if a["generator"] is not None:
        return NotImplemented
    return emit_positional(rec, Bernoulli, args[0], outs, a.get("p"), outs[0].dtype, grad=False)


@API.rule(Tensor.bernoulli_, kind="local, random")
def bernoulli_in_place(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    a = {"p": 0.5} | dict(zip(("self", "p"), args, strict=False)) | kwargs
    if a.get("generator") is not None or not a["self"].is_map or not isinstance(a["p"], (int, float)):
        return NotImplemented
    return emit_positional(rec, Bernoulli, a["self"], outs, a["p"], a["self"].dtype, grad=False)


@ATEN.rule(aten.empty_like.default, kind="local")
def empty_like(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """A tensor to be filled is one of zeros."""
    x = args[0]
    dtype = {"dtype": outs[0].dtype}
    return local(rec, aten.zeros_like.default, [x], dtype, outs[0], x.space, name="empty_like", grad=False)
