"""What training steps are made of, by name: contents of images, layers, and what a user's code does with maps and
small results. Every entry is ordinary PyTorch: plain tensors and tiled ones go through the same lines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_plugin import materialize

Map = Callable[[Tensor], Tensor]


# Contents of images --------------------------------------------------------------------------------------------------


def noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)


def repeated(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """One patch again and again: every value inside is met several times, the largest too."""
    patch = torch.randn((*shape[:2], 6, 7), generator=generator)
    return patch.repeat(1, 1, -(-shape[2] // 6), -(-shape[3] // 7))[..., : shape[2], : shape[3]].clone()


def mirrored(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    half = torch.randn((*shape[:3], -(-shape[3] // 2)), generator=generator)
    return torch.cat([half, half.flip(3)], 3)[..., : shape[3]].clone()


def margins(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Tissue in the middle of background."""
    image = torch.full(shape, 0.75)
    h, w = shape[2] // 3, shape[3] // 3
    image[..., h : 2 * h + 1, w : 2 * w + 1] = torch.randn((*shape[:2], h + 1, w + 1), generator=generator)
    return image


def constant(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.full(shape, 0.5)


def whole(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Whole numbers: with weights that are whole too, equal values come of unequal pixels."""
    return torch.randint(-2, 3, shape, generator=generator).float()


CONTENTS = {
    "noise": noise, "repeated": repeated, "mirrored": mirrored, "margins": margins, "constant": constant, "whole": whole
}  # fmt: skip


# Layers --------------------------------------------------------------------------------------------------------------

#: Each makes a module for so many channels in and out; what is no convolution keeps the channels.
LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "conv1": lambda c, w: nn.Conv2d(c, w, 1),
    "conv3": lambda c, w: nn.Conv2d(c, w, 3, padding=1),
    "conv5": lambda c, w: nn.Conv2d(c, w, 5, padding=2, bias=False),
    "valid3": lambda c, w: nn.Conv2d(c, w, 3),
    "reflect3": lambda c, w: nn.Conv2d(c, w, 3, padding=1, padding_mode="reflect"),
    "down3": lambda c, w: nn.Conv2d(c, w, 3, stride=2, padding=1),
    "batch": lambda c, w: nn.BatchNorm2d(c),
    "cumulative batch": lambda c, w: nn.BatchNorm2d(c, momentum=None),
    "instance": lambda c, w: nn.InstanceNorm2d(c, affine=True, track_running_stats=True),
    "group": lambda c, w: nn.GroupNorm(2, c),
    "relu": lambda c, w: nn.ReLU(),
    "relu_": lambda c, w: nn.ReLU(inplace=True),
    "gelu": lambda c, w: nn.GELU(),
    "tanh": lambda c, w: nn.Tanh(),
    "prelu": lambda c, w: nn.PReLU(c),
    "max pool": lambda c, w: nn.MaxPool2d(2),
    "average pool": lambda c, w: nn.AvgPool2d(3, 2, 1),
    "up": lambda c, w: nn.Upsample(scale_factor=2),
}
CONVOLUTIONS = tuple(name for name in LAYERS if name[-1].isdigit())
NORMS = ("batch", "cumulative batch", "instance", "group")
RUNNING = ("batch", "cumulative batch", "instance")
#: With whole pixels and weights, what these compute is whole, in whatever order it is added up.
EXACT = (*(n for n in CONVOLUTIONS if n != "conv5"), "relu", "relu_", "max pool")


# What a user's code does with a map ----------------------------------------------------------------------------------


def zero_channel(y: Tensor) -> Tensor:
    y[:, 0] = 0
    return y


def scale_through_view(y: Tensor) -> Tensor:
    y[:, :2].mul_(2)
    return y


def add_in_place(y: Tensor) -> Tensor:
    y += 1
    return y


def negatives(y: Tensor) -> Tensor:
    y[y < 0] = 0
    return y


def leaky_negatives(y: Tensor) -> Tensor:
    y[y < 0] *= 0.25
    return y


def transposed_in_place(y: Tensor) -> Tensor:
    return (y * 1).transpose_(2, 3)


def corner(y: Tensor) -> Tensor:
    y[..., :3, :4] = 0
    return y


def flat_view(y: Tensor) -> Tensor:
    y.flatten(2)[:, :, 0] = 0
    return y


def value_from_before(y: Tensor) -> Tensor:
    z = y * 2
    y[:, 0] = 0
    return y + z


def view_from_before(y: Tensor) -> Tensor:
    first = y[:, :1]
    y.mul_(2)
    return torch.cat([first, y], 1)


def channel_swap(y: Tensor) -> Tensor:
    y[:, 0] = y[:, 1]
    return y


def detached_weight(y: Tensor) -> Tensor:
    return y * y.detach().sigmoid()


def without_grad(y: Tensor) -> Tensor:
    with torch.no_grad():
        weight = y.mean((2, 3), keepdim=True)
    return y - weight


@dataclass(frozen=True)
class Edit:
    """``writes``: in place. ``odd``: the engine may refuse it, with a way out; everyday code it may not."""

    apply: Map
    writes: bool = True
    odd: bool = False


EDITS = {
    "nothing": Edit(lambda y: y, writes=False),
    "y[:, 0] = 0": Edit(zero_channel),
    "y[:, :2].mul_(2)": Edit(scale_through_view),
    "y += 1": Edit(add_in_place),
    "y[y < 0] = 0": Edit(negatives),
    "y[y < 0] *= 0.25": Edit(leaky_negatives, odd=True),
    "y.transpose_(2, 3)": Edit(transposed_in_place, writes=False),
    "y[..., :3, :4] = 0": Edit(corner, odd=True),
    "y[:, 0] = y[:, 1]": Edit(channel_swap, odd=True),
    "y.flatten(2)[:, :, 0] = 0": Edit(flat_view, odd=True),
    "z = y * 2; y[:, 0] = 0; y + z": Edit(value_from_before),
    "v = y[:, :1]; y.mul_(2); cat": Edit(view_from_before, odd=True),
    "y * y.detach().sigmoid()": Edit(detached_weight, writes=False),
    "y - mean without grad": Edit(without_grad, writes=False),
}


# A value that is asked for in the middle of a network -----------------------------------------------------------------


def check_finite(y: Tensor, seen: list[float]) -> None:
    assert torch.isfinite(y).all()


def branch(y: Tensor, seen: list[float]) -> Tensor:
    return y * 2 if y.mean() > 0.123 else y


def print_mean(y: Tensor, seen: list[float]) -> None:
    assert "tensor" in repr(y.mean())


def log_item(y: Tensor, seen: list[float]) -> None:
    seen.append(y.detach().square().mean().item())


def log_std(y: Tensor, seen: list[float]) -> None:
    with torch.no_grad():
        seen.append(float(y.std()))


def log_array(y: Tensor, seen: list[float]) -> None:
    seen.extend(y.detach().double().sum((2, 3)).numpy().ravel().tolist())


def log_list(y: Tensor, seen: list[float]) -> None:
    seen.extend(y.amax((0, 2, 3)).tolist())


def count_positive(y: Tensor, seen: list[float]) -> None:
    assert len((y.mean((2, 3)) > 0.123).nonzero()) <= y.shape[0] * y.shape[1]


def scale_by_number(y: Tensor, seen: list[float]) -> Tensor:
    return y / (1 + y.detach().abs().mean().item())


def whole_map(y: Tensor, seen: list[float]) -> None:
    seen.append(float(materialize(y.detach()).double().abs().sum()))


#: Each gets a map, and a list for the numbers that it saw; it returns another map, or None.
ASKS: dict[str, Callable[[Tensor, list[float]], Tensor | None]] = {
    "assert isfinite": check_finite, "if y.mean() > 0.123": branch, "print(y.mean())": print_mean, "item": log_item,
    "std without grad": log_std, "numpy": log_array, "tolist": log_list, "nonzero": count_positive,
    "y / number": scale_by_number, "materialize": whole_map,
}  # fmt: skip


# From a map to a vector ----------------------------------------------------------------------------------------------


def attention(y: Tensor) -> Tensor:
    flat = y.flatten(2)
    return (flat.softmax(2) * flat).sum(2)


def largest_and_where(y: Tensor) -> Tensor:
    values, places = y.flatten(2).max(2)
    return values + y.flatten(2).gather(2, places[..., None]).squeeze(2)


def wide(y: Tensor) -> Tensor:
    """A map in a type that quantiles and complex numbers are made of."""
    return y if y.dtype == torch.float64 else y.float()


def spectrum(y: Tensor) -> Tensor:
    y = wide(y)
    return torch.complex(y, y.roll(1, 1))


def coherence(y: Tensor) -> Tensor:
    z = spectrum(y).flatten(2)
    return (z @ z.mH / z.shape[2]).abs().mean(2)


@dataclass(frozen=True)
class Pool:
    """``selects``: its gradient goes to some positions only. ``any_tie``: to which of equal ones, PyTorch leaves open.
    ``saves``: backward needs the result."""

    apply: Map
    selects: bool = False
    any_tie: bool = False


POOLS = {
    "mean": Pool(lambda y: y.mean((2, 3))),
    "sum": Pool(lambda y: y.sum((2, 3)) / 100),
    "adaptive average": Pool(lambda y: F.adaptive_avg_pool2d(y, 1).flatten(1)),
    "logsumexp": Pool(lambda y: y.logsumexp((2, 3))),
    "std": Pool(lambda y: y.std((2, 3))),
    "norm": Pool(lambda y: y.norm(dim=(2, 3))),
    "attention": Pool(attention),
    "amax": Pool(lambda y: y.amax((2, 3)), selects=True),
    "amin": Pool(lambda y: y.amin((2, 3)), selects=True),
    "max": Pool(lambda y: y.flatten(2).max(2).values, selects=True),
    "max and where": Pool(largest_and_where, selects=True),
    "max of rows": Pool(lambda y: y.max(3).values.mean(2), selects=True),
    "amax of rows": Pool(lambda y: y.amax(3).logsumexp(2), selects=True),
    "adaptive max": Pool(lambda y: F.adaptive_max_pool2d(y, 1).flatten(1), selects=True),
    "adaptive max of 4": Pool(lambda y: F.adaptive_max_pool2d(y, 2).mean((2, 3)), selects=True),
    "max pool": Pool(lambda y: F.max_pool2d(y, 3, 2, 1).mean((2, 3)), selects=True),
    "topk": Pool(lambda y: y.flatten(2).topk(2).values.sum(2), selects=True, any_tie=True),
    "median": Pool(lambda y: y.flatten(2).median(2).values, selects=True, any_tie=True),
    "quantile": Pool(lambda y: wide(y).flatten(2).quantile(0.7, dim=2), selects=True, any_tie=True),
    "complex mean": Pool(lambda y: spectrum(y).mean((2, 3))),
    "complex mean of a conjugate": Pool(lambda y: (spectrum(y).conj() * 1j).mean((2, 3)).imag),
    "complex std": Pool(lambda y: spectrum(y).std((2, 3))),
    "complex norm": Pool(lambda y: spectrum(y).norm(dim=(2, 3))),
    "complex products": Pool(coherence),
    "sort": Pool(lambda y: y.flatten(2).sort(2).values[:, :, -2:].sum(2), selects=True, any_tie=True),
}


# What a user's code does with a small result -------------------------------------------------------------------------


def scale_in_place(v: Tensor) -> Tensor:
    v.mul_(2)
    return v


def set_column(v: Tensor) -> Tensor:
    v[:, 0] = 0
    return v


def scale_column(v: Tensor) -> Tensor:
    v[:, :1].mul_(3)
    return v


def double_gradient(v: Tensor) -> Tensor:
    if v.requires_grad:
        v.register_hook(lambda gradient: 2 * gradient)
    return v


SMALLS: dict[str, tuple[Map, bool]] = {
    "nothing": (lambda v: v, False),
    "v.mul_(2)": (scale_in_place, True),
    "v[:, 0] = 0": (set_column, True),
    "v[:, :1].mul_(3)": (scale_column, True),
    "v.relu_()": (lambda v: v.relu_(), True),
    "v.register_hook(double)": (double_gradient, False),
    "v.sigmoid()": (lambda v: v.sigmoid(), False),
}
