"""The operators that random networks are made of: each draws one module for a map of a given shape.

Every function takes hypothesis's `draw` and a shape ``(N, C, *extent)`` and returns a module with random parameters.
What PyTorch itself refuses at that shape (a window larger than its padded map) is not used; see `networks`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

Draw = Callable[..., Any]
Shape = Sequence[int]


def each_axis(draw: Draw, shape: Shape, values: st.SearchStrategy[int]) -> tuple[int, ...]:
    """One value for all axes, or one for each."""
    count = len(shape) - 2
    if draw(st.booleans()):
        return (draw(values),) * count
    return tuple(draw(values) for _ in range(count))


def of_rank(shape: Shape, name: str) -> Any:
    return getattr(nn, f"{name}{len(shape) - 2}d")


class Apply(nn.Module):
    """A function with its arguments, as a module that prints them."""

    def __init__(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.func, self.args, self.kwargs = func, args, kwargs

    def forward(self, *tensors: Tensor) -> Any:
        return self.func(*tensors, *self.args, **self.kwargs)

    def extra_repr(self) -> str:
        return f"{getattr(self.func, '__name__', self.func)}, {self.args}, {self.kwargs}"


# Window --------------------------------------------------------------------------------------------------------------


def convolution(draw: Draw, shape: Shape) -> nn.Module:
    channels = shape[1]
    groups = draw(st.sampled_from([g for g in (1, 1, 2, channels) if channels % g == 0]))
    out = groups * draw(st.integers(1, max(1, 6 // groups)))
    kernel = each_axis(draw, shape, st.integers(1, 5))
    dilation = each_axis(draw, shape, st.sampled_from([1, 1, 1, 2, 3]))
    stride = each_axis(draw, shape, st.sampled_from([1, 1, 2, 3]))
    mode = draw(st.sampled_from(["zeros", "zeros", "zeros", "reflect", "replicate", "circular"]))
    padding: Any
    if draw(st.integers(0, 5)) == 0:
        padding, stride = "same", (1,) * len(kernel)
    else:
        padding = tuple(draw(st.integers(0, d * (k - 1))) for k, d in zip(kernel, dilation, strict=True))
    return of_rank(shape, "Conv")(
        channels, out, kernel, stride, padding, dilation, groups, draw(st.booleans()), padding_mode=mode
    )


def transposed(draw: Draw, shape: Shape) -> nn.Module:
    stride = each_axis(draw, shape, st.integers(1, 3))
    kernel = tuple(draw(st.integers(1, 4)) for _ in stride)
    padding = tuple(draw(st.integers(0, (k - 1) // 2)) for k in kernel)
    extra = tuple(draw(st.integers(0, s - 1)) for s in stride)
    return of_rank(shape, "ConvTranspose")(
        shape[1], draw(st.integers(1, 4)), kernel, stride, padding, extra, bias=draw(st.booleans())
    )


def max_pool(draw: Draw, shape: Shape) -> nn.Module:
    kernel = each_axis(draw, shape, st.integers(1, 4))
    return of_rank(shape, "MaxPool")(
        kernel,
        each_axis(draw, shape, st.integers(1, 3)),
        tuple(draw(st.integers(0, k // 2)) for k in kernel),
        each_axis(draw, shape, st.sampled_from([1, 1, 2])),
        ceil_mode=draw(st.booleans()),
    )


def average_pool(draw: Draw, shape: Shape) -> nn.Module:
    kernel = each_axis(draw, shape, st.integers(1, 4))
    how: dict[str, Any] = {"ceil_mode": draw(st.booleans()), "count_include_pad": draw(st.booleans())}
    if len(shape) > 3 and draw(st.integers(0, 4)) == 0:
        how["divisor_override"] = draw(st.integers(1, 7))
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    return of_rank(shape, "AvgPool")(kernel, each_axis(draw, shape, st.integers(1, 3)), padding, **how)


def power_pool(draw: Draw, shape: Shape) -> nn.Module:
    return of_rank(shape, "LPPool")(2, draw(st.integers(2, 3)), ceil_mode=draw(st.booleans()))


def adaptive_pool(draw: Draw, shape: Shape) -> nn.Module:
    size = each_axis(draw, shape, st.integers(1, 4))
    return of_rank(shape, draw(st.sampled_from(["AdaptiveAvgPool", "AdaptiveMaxPool"])))(size)


# Resample and layout -------------------------------------------------------------------------------------------------


def upsample(draw: Draw, shape: Shape) -> nn.Module:
    linear = {3: "linear", 4: "bilinear", 5: "trilinear"}[len(shape)]
    modes = ["nearest", linear, "nearest-exact"] + (["bicubic"] if len(shape) == 4 else [])
    mode = draw(st.sampled_from(modes))
    how: dict[str, Any] = {"mode": mode}
    if "nearest" not in mode:
        how["align_corners"] = draw(st.booleans())
    if draw(st.booleans()):
        how["scale_factor"] = draw(st.sampled_from([2, 3, 0.5, 1.7]))
    else:
        how["size"] = tuple(draw(st.integers(1, 2 * s)) for s in shape[2:])
    return Apply(F.interpolate, **how)


def pixel_shuffle(draw: Draw, shape: Shape) -> nn.Module:
    if draw(st.booleans()):
        return nn.Sequential(nn.Conv2d(shape[1], 4, 1), nn.PixelShuffle(2))
    return nn.PixelUnshuffle(draw(st.integers(1, 3)))


def pad(draw: Draw, shape: Shape) -> nn.Module:
    mode = draw(st.sampled_from(["constant", "reflect", "replicate", "circular"]))
    low = -1 if mode == "constant" else 0
    amounts = [draw(st.integers(low, 3)) for _ in range(2 * (len(shape) - 2))]
    return Apply(F.pad, amounts, mode=mode)


def crop(x: Tensor, starts: Sequence[int], steps: Sequence[int]) -> Tensor:
    return x[(..., *(slice(a, None, s) for a, s in zip(starts, steps, strict=True)))]


def strided_slice(draw: Draw, shape: Shape) -> nn.Module:
    starts = [draw(st.integers(0, (s - 1) // 2)) for s in shape[2:]]
    return Apply(crop, starts, [draw(st.integers(1, 2)) for _ in starts])


def flip_or_roll(draw: Draw, shape: Shape) -> nn.Module:
    dims = sorted(draw(st.sets(st.integers(2, len(shape) - 1), min_size=1)))
    if draw(st.booleans()):
        return Apply(torch.flip, dims)
    return Apply(torch.roll, [draw(st.integers(-4, 4)) for _ in dims], dims)


# Normalisation -------------------------------------------------------------------------------------------------------


def batch_norm(draw: Draw, shape: Shape) -> nn.Module:
    norm = of_rank(shape, "BatchNorm")(
        shape[1],
        eps=1e-3,
        momentum=draw(st.sampled_from([0.1, 0.7, None])),
        affine=draw(st.booleans()),
        track_running_stats=draw(st.booleans()),
    )
    return one_sided(draw, norm)


def one_sided(draw: Draw, norm: nn.Module) -> nn.Module:
    """Now and then a norm with only a weight or only a bias."""
    if norm.weight is not None and draw(st.integers(0, 4)) == 0:
        norm.register_parameter(draw(st.sampled_from(["weight", "bias"])), None)
    return norm


def other_norm(draw: Draw, shape: Shape) -> nn.Module:
    channels = shape[1]
    kind = draw(st.sampled_from(["group", "instance", "layer", "space", "response"]))
    affine = draw(st.booleans())
    if kind == "group":
        groups = draw(st.sampled_from([g for g in range(1, channels + 1) if channels % g == 0]))
        return one_sided(draw, nn.GroupNorm(groups, channels, eps=1e-3, affine=affine))
    if kind == "instance":
        track = draw(st.booleans())
        norm = of_rank(shape, "InstanceNorm")(channels, eps=1e-3, affine=affine, track_running_stats=track)
        return one_sided(draw, norm)
    if kind == "response":
        return nn.LocalResponseNorm(draw(st.integers(1, 3)))
    if kind == "space":
        return nn.LayerNorm(tuple(shape[1:]), eps=1e-3, elementwise_affine=affine)
    return ChannelsLast(nn.LayerNorm(channels, eps=1e-3, elementwise_affine=affine))


class ChannelsLast(nn.Module):
    """A layer on the last dimension, with the channels there, as ConvNeXt has its norms and linear layers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.movedim(1, -1)).movedim(-1, 1)


def linear(draw: Draw, shape: Shape) -> nn.Module:
    return ChannelsLast(nn.Linear(shape[1], draw(st.integers(1, 5)), bias=draw(st.booleans())))


# Local ---------------------------------------------------------------------------------------------------------------

IN_PLACE = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.Hardswish, nn.SiLU, nn.Hardtanh, nn.Mish, nn.ReLU6)
OUT_OF_PLACE = (nn.GELU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Hardsigmoid, nn.Tanhshrink)


def activation(draw: Draw, shape: Shape, inplace: bool = False) -> nn.Module:
    kind = draw(st.sampled_from(IN_PLACE if inplace else IN_PLACE + OUT_OF_PLACE))
    if kind in IN_PLACE:
        return kind(inplace=inplace)
    return kind()


def channel_function(draw: Draw, shape: Shape) -> nn.Module:
    choice = draw(st.integers(0, 4))
    if choice == 0:
        return nn.PReLU(draw(st.sampled_from([1, shape[1]])))
    if choice == 1:
        return nn.Softmax(dim=1)
    if choice == 2:
        return Apply(torch.cumsum, 1)
    if choice == 3:
        return Apply(F.normalize, dim=1, eps=1e-3)
    return Apply(lambda x: torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1))


class Scale(nn.Module):
    """A layer scale, one value for each channel, or a positional embedding, one for each position."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(tuple(shape)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight

    def extra_repr(self) -> str:
        return str(tuple(self.weight.shape))


def scale(draw: Draw, shape: Shape) -> nn.Module:
    if draw(st.booleans()):
        return Scale((shape[1], *(1 for _ in shape[2:])))
    return Scale(tuple(s if draw(st.booleans()) else 1 for s in shape[1:]))


# Reduce and broadcast ------------------------------------------------------------------------------------------------


class Squeeze(nn.Module):
    """Squeeze-and-excite: a gate for each channel from the pooled map."""

    def __init__(self, channels: int, rank: int, pool: str) -> None:
        super().__init__()
        self.dims = tuple(range(2, rank))
        self.pool = pool
        self.fc = nn.Sequential(nn.Linear(channels, 3), nn.ReLU(), nn.Linear(3, channels))

    def forward(self, x: Tensor) -> Tensor:
        if self.pool == "softmax":  # attention pooling over positions
            flat = x.flatten(2)
            pooled = (flat * flat[:, :1].softmax(-1)).sum(-1)
        elif self.pool == "norm":  # global response normalisation
            pooled = torch.linalg.vector_norm(x, dim=self.dims) + 1e-3
        else:
            pooled = getattr(x, self.pool)(self.dims)
        gate = self.fc(pooled).sigmoid()
        return x * gate[(..., *(None for _ in self.dims))]

    def extra_repr(self) -> str:
        return self.pool


def squeeze(draw: Draw, shape: Shape) -> nn.Module:
    pool = draw(st.sampled_from(["mean", "amax", "sum", "logsumexp", "norm", "softmax", "amin"]))
    return Squeeze(shape[1], len(shape), pool)


def centre(x: Tensor, dims: Sequence[int]) -> Tensor:
    return x - x.mean(tuple(dims), keepdim=True)


def standardise(x: Tensor, dims: Sequence[int]) -> Tensor:
    var, mean = torch.var_mean(x, dim=tuple(dims), keepdim=True)
    return (x - mean) / (var + 1e-2).sqrt()


def by_hand(draw: Draw, shape: Shape) -> nn.Module:
    """Statistics written out by the user, over all of space or over one axis."""
    dims = list(range(2, len(shape)))
    if draw(st.integers(0, 2)) == 0:
        dims = [draw(st.sampled_from(dims))]
    if draw(st.integers(0, 3)) == 0:
        dims = [0, *dims]
    return Apply(draw(st.sampled_from([centre, standardise])), dims)


# Complex -------------------------------------------------------------------------------------------------------------


def modulated(z: Tensor, dims: Sequence[int]) -> Tensor:
    """By a complex vector, the mean."""
    mean = z.mean(tuple(dims), keepdim=True)
    return z * mean.conj() / (1 + (mean * mean.conj()).real)


def whitened(z: Tensor, dims: Sequence[int]) -> Tensor:
    return z * torch.rsqrt(z.var(tuple(dims), correction=0, keepdim=True) + 1)


def scaled_to_norm(z: Tensor, dims: Sequence[int]) -> Tensor:
    return z / (1 + torch.linalg.vector_norm(z, dim=tuple(dims), keepdim=True))


def shifted_by_sum(z: Tensor, dims: Sequence[int]) -> Tensor:
    return z + z.sum(tuple(dims), keepdim=True) * (0.1 - 0.2j)


def correlated(z: Tensor, dims: Sequence[int]) -> Tensor:
    """By the Gram matrix of the channels."""
    flat = z.flatten(2)
    gram = flat @ flat.mH
    return ((gram / (1 + torch.linalg.vector_norm(gram))) @ flat).reshape(z.shape)


def turned(z: Tensor, dims: Sequence[int]) -> Tensor:
    return z.conj() * 1j + z.abs()


def imaginary_part_halved(z: Tensor, dims: Sequence[int]) -> Tensor:
    z = z * 1
    z.imag.mul_(0.5)
    return z


class Complex(nn.Module):
    """A complex map of a map's channels, functions of it, and the sum of both parts."""

    def __init__(self, channels: int, rank: int, steps: Sequence[Callable[..., Tensor]]) -> None:
        super().__init__()
        self.dims, self.steps = tuple(range(2, rank)), steps
        self.weight = nn.Parameter(torch.randn(2, channels, *(1 for _ in self.dims)))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(x, x.roll(1, 1) * 0.5) * torch.complex(self.weight[0], self.weight[1])
        for step in self.steps:
            z = step(z, self.dims)
        return z.real + z.imag

    def extra_repr(self) -> str:
        return ", ".join(step.__name__ for step in self.steps)


def complex_map(draw: Draw, shape: Shape) -> nn.Module:
    functions = (
        modulated, whitened, scaled_to_norm, shifted_by_sum, correlated, turned, imaginary_part_halved,
    )  # fmt: skip
    return Complex(shape[1], len(shape), draw(st.lists(st.sampled_from(functions), min_size=1, max_size=3)))


#: Operators of one map; the common ones are listed more than once.
UNARY = (
    *(convolution,) * 5, transposed, max_pool, average_pool, power_pool, adaptive_pool, upsample, pixel_shuffle, pad,
    strided_slice, flip_or_roll, *(batch_norm,) * 2, *(other_norm,) * 2, linear, *(activation,) * 3, channel_function,
    scale, squeeze, by_hand, complex_map,
)  # fmt: skip
#: Whose result nobody has saved for backward, so that it may be overwritten.
OVERWRITABLE = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
