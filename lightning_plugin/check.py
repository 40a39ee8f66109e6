"""`check`: compare tiled steps of the user's model with plain PyTorch's."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_plugin.module import TiledModule
from lightning_plugin.ops import has_gradients
from lightning_plugin.private import DropoutBase, tree_leaves

#: Upper bound of errors by floating-point reassociation in float64.
TOLERANCE = 1e-9
#: Largest distance of float32 gradients to those of float64, as a multiple of plain PyTorch's own distance.
MAX_DISTANCE_RATIO = 2.0
#: Distance that is never an error, as a part of the gradients' norm: a few roundings of values that plain PyTorch may
#: compute without rounding.
MIN_DISTANCE = 1e-6
#: Differences that no comparison of small steps can show.
UNSEEN = (
    "random numbers for each position of a map (randn_like, normal_, ...): tiles draw others than plain PyTorch does",
    "other sizes, grids and plans than these",
    "a step of several calls, and tensors that change between its forward and its backward",
    "sources that read files, other devices, lower precision than float32",
)


@dataclass(frozen=True)
class Report:
    """Result of `check`; true if the tiled steps are exact.

    Attributes:
        errors: Error of every tensor in float64.
        barriers: Operators that ran whole.
        skipped: Parts that were not compared, with the reason.
        rounding: Distances of the tiled and of the plain float32 gradients to those of float64, as parts of their norm,
            for each image.
        unseen: Differences that the comparison cannot show.
    """

    errors: dict[str, float]
    barriers: tuple[str, ...]
    skipped: tuple[str, ...] = ()
    rounding: dict[str, tuple[float, float]] = field(default_factory=dict)
    unseen: tuple[str, ...] = UNSEEN

    @property
    def exact(self) -> bool:
        is_close = all(
            tiled <= max(MAX_DISTANCE_RATIO * plain, MIN_DISTANCE) for tiled, plain in self.rounding.values()
        )
        return is_close and all(e < TOLERANCE for e in self.errors.values())

    def __bool__(self) -> bool:
        return self.exact

    def __str__(self) -> str:
        width = max(map(len, self.errors), default=0)
        lines = [
            f"{name.ljust(width)}  {error:.1e}{'' if error < TOLERANCE else '   <-- differs'}"
            for name, error in self.errors.items()
        ]
        lines += [
            f"float32, {content}: {tiled:.1e} from float64, plain PyTorch {plain:.1e}"
            for content, (tiled, plain) in self.rounding.items()
        ]
        lines += [f"run whole, for want of a tiling rule: {b}" for b in self.barriers]
        lines += [f"not compared: {s}" for s in (*self.skipped, *self.unseen)]
        wrong = (
            f"NOT exact: errors of {TOLERANCE:g} and more in float64 are not reassociation, nor is a distance of more "
        )
        wrong += f"than {MAX_DISTANCE_RATIO:g} times plain PyTorch's own in float32"
        lines.append("exact" if self.exact else wrong)
        return "\n".join(lines)


def check(
    module: nn.Module, small_input: Tensor | Sequence[int], tiles: int | Sequence[int] = (3, 2), seed: int = 0
) -> Report:
    """Compare tiled steps of a module with plain ones, and report the error of every tensor::

        print(check(model, (1, 3, 300, 260)))

    Copies of the module are compared, in its mode; the module itself is not changed. Dropout is switched off, since its
    masks would differ; the report says so. In float64 the error of a tensor is max|a-b| / max(max|b|, 1e-3 × the
    largest gradient in the network). In float32 the distance of all gradients to those of float64 may be twice plain
    PyTorch's. Two images are compared: the given one, and one with repeated content, so that maxima tie.

    Args:
        module: The model.
        small_input: An image that plain PyTorch can hold, or the shape of a random one.
        tiles: Number of tiles along each spatial axis.
        seed: Seed of the random numbers in both steps.

    Returns:
        The report: print it, or test it as a bool. Its attributes are ``errors``, ``barriers``, ``skipped``,
        ``rounding`` and ``unseen``.
    """
    module = copy.deepcopy(module)
    skipped = [f"{name}: dropout is switched off for the comparison" for name in _switch_off_dropout(module)]
    torch.manual_seed(seed)
    x = small_input.detach() if isinstance(small_input, Tensor) else torch.randn(tuple(small_input))
    errors: dict[str, float] = {}
    rounding: dict[str, tuple[float, float]] = {}
    barriers: tuple[str, ...] = ()
    for content, image in (("the image", x), ("repeated content", _repeated(x))):
        expected = _Step.run(module, image, torch.float64, None, seed)
        if not expected.is_finite:
            if image is x:
                raise ValueError("plain PyTorch's own step on this image is not finite: check another image")
            skipped.append(f"{content}: plain PyTorch's own step is not finite")
            continue
        actual = _Step.run(module, image, torch.float64, tiles, seed)
        prefix = "" if content == "the image" else f"{content}: "
        found = _errors(actual, expected)
        if prefix:  # the last bits of equal maxima decide which of them gets the image's gradient
            found.pop("gradient of input", None)
        errors |= {prefix + name: e for name, e in found.items()}
        distances = [_Step.run(module, image, torch.float32, t, seed).distance(expected) for t in (tiles, None)]
        rounding[content] = distances[0], distances[1]
        barriers = actual.barriers
    return Report(errors, barriers, tuple(skipped), rounding)


def _repeated(x: Tensor) -> Tensor:
    """Make an image of the same size that repeats the first half of each axis."""
    for d in range(2, x.dim()):
        half = x.narrow(d, 0, -(-x.shape[d] // 2))
        x = torch.cat([half, half], d).narrow(d, 0, x.shape[d])
    return x


@dataclass(frozen=True)
class _Step:
    """Results of one step."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    barriers: tuple[str, ...] = ()

    @staticmethod
    def run(
        module: nn.Module, image: Tensor, dtype: torch.dtype, tiles: int | Sequence[int] | None, seed: int
    ) -> _Step:
        """Run a step on a copy of a module; without ``tiles`` it is plain PyTorch's."""
        module = _in_precision(copy.deepcopy(module), dtype)
        x = _cast(image, dtype).clone().requires_grad_()
        tiled = None if tiles is None else TiledModule(module, tiles=tiles)
        torch.manual_seed(seed)
        outputs = _tensors((module if tiled is None else tiled)(x))
        weights = [torch.randn(o.shape, dtype=torch.float64).to(o.dtype) for o in outputs]
        total = sum((o * w).sum() for o, w in zip(outputs, weights, strict=True))
        if isinstance(total, Tensor) and total.requires_grad:
            total.backward()
        gradients = {**{name: p.grad for name, p in module.named_parameters()}, "input": x.grad}
        barriers = () if tiled is None or tiled.plan is None else tiled.plan.barriers
        return _Step(
            [o.detach() for o in outputs],
            {name: None if g is None else _real(g) for name, g in gradients.items()},
            {name: _real(b) for name, b in module.named_buffers()},
            barriers,
        )

    @property
    def is_finite(self) -> bool:
        """True if no output and no gradient has a NaN or an infinity."""
        return all(bool(t.isfinite().all()) for t in (*self.outputs, *self.gradients.values()) if t is not None)

    def distance(self, reference: _Step) -> float:
        """Return the distance of all parameters' gradients to the reference's, as a part of the reference's norm."""
        difference = norm = 0.0
        for name, expected in reference.gradients.items():
            actual = self.gradients[name]
            if expected is not None and actual is not None and name != "input":
                difference += float((actual.double() - expected.double()).square().sum())
                norm += float(expected.double().square().sum())
        return math.sqrt(difference / norm) if norm else math.sqrt(difference)


def _errors(actual: _Step, expected: _Step) -> dict[str, float]:
    """Return the error of every tensor of a step."""
    several = len(expected.outputs) > 1
    errors = {
        f"output {i}" if several else "output": _error(a, e)
        for i, (a, e) in enumerate(zip(actual.outputs, expected.outputs, strict=True))
    }
    gradients = [g for g in expected.gradients.values() if g is not None and g.numel()]
    largest = max((float(g.abs().max()) for g in gradients), default=0.0)
    for name, e in expected.gradients.items():
        a = actual.gradients[name]
        if e is not None or a is not None:
            errors[f"gradient of {name}"] = _error(a, e, 1e-3 * largest)
    for name, buffer in expected.buffers.items():
        errors[f"buffer {name}"] = _error(actual.buffers[name], buffer)
    return errors


def _switch_off_dropout(module: nn.Module) -> list[str]:
    """Switch off dropout, and return the paths of the dropout modules."""
    paths = []
    for name, child in module.named_modules():
        if isinstance(child, DropoutBase) and child.training and child.p:
            child.eval()
            paths.append(name or type(child).__name__)
    return paths


def _tensors(out: Any) -> list[Tensor]:
    return [_real(t) for t in tree_leaves(out) if isinstance(t, Tensor) and has_gradients(t.dtype)]


def _real(t: Tensor) -> Tensor:
    """Return a complex tensor's real and imaginary parts as one real tensor; a real one unchanged."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def _in_precision(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a module's tensors to the precision of a type; `Module.to` would make complex ones real."""
    for t in (*module.parameters(), *module.buffers()):
        if has_gradients(t.dtype):
            t.data = _cast(t.data, dtype)
    return module


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a tensor to a type, or if it is complex to the complex type of the same precision."""
    return t.to(dtype.to_complex() if t.is_complex() else dtype)


def _error(actual: Tensor | None, expected: Tensor | None, floor: float = 0.0) -> float:
    if actual is None or expected is None:
        only = expected if actual is None else actual
        return 0.0 if only is None or not only.any() else float("inf")
    if not expected.numel():
        return 0.0
    difference = float((actual.detach().double() - expected.detach().double()).abs().max())
    scale = max(float(expected.detach().abs().max()), floor)
    return difference / scale if scale else difference
