"""Functions of the user's: custom autograd functions run whole, or on tiles if they are declared elementwise;
scripted ones run as the Python functions that they were made of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_plugin import BarrierError, LazyImage, TiledModule, check, elementwise, make_plan
from tests.exactness import TOLERANCE, assert_exact, difference
from tests.zoo import fill


class Round(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Reverse(torch.autograd.Function):
    """A gradient reversal, whose result is a view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -ctx.factor * gradient, None


class Swish(torch.autograd.Function):
    """An activation that keeps its input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return gradient * s * (1 + x * (1 - s))


@elementwise
class TiledSwish(Swish):
    pass


@elementwise
class Scaled(torch.autograd.Function):
    """By a number for each channel, with a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        return 2 * gradient * scale, (gradient * x).sum((0, 2, 3), keepdim=True)


class Several(torch.autograd.Function):
    """A map and a vector of it, with `setup_context`."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return x * scale, x.sum((2, 3), keepdim=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_sum: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        return gradient * scale * 2 + of_sum, (gradient * x).sum((0, 2, 3), keepdim=True)


class Itself(torch.autograd.Function):
    """Its very argument, with another derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


class Normed(torch.autograd.Function):
    """By its largest element, which is read as a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.largest = float(x.abs().max())
        return x / ctx.largest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / ctx.largest


class Net(nn.Module):
    def __init__(self, middle: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3)
        self.scale = nn.Parameter(torch.ones(1, 4, 1, 1))
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.middle(3 * self.conv(x), self.scale))


def several(h: Tensor, scale: Tensor) -> Tensor:
    a, b = Several.apply(h, scale)
    return a + b


MIDDLES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "straight through": lambda h, scale: Round.apply(h),
    "reversal": lambda h, scale: Reverse.apply(h, 0.3),
    "written in place": lambda h, scale: torch.relu_(Round.apply(h)),
    "swish": lambda h, scale: Swish.apply(h),
    "several": several,
    "itself": lambda h, scale: Itself.apply(h),
    "of data": lambda h, scale: Normed.apply(h),
    "of vectors": lambda h, scale: h * Reverse.apply(h.mean((2, 3), keepdim=True), 0.5) * Swish.apply(scale),
    "declared": lambda h, scale: TiledSwish.apply(h),
    "declared, with a vector": lambda h, scale: Scaled.apply(h, scale),
}
WHOLE = {"straight through", "reversal", "written in place", "swish", "several", "itself"}


@pytest.mark.parametrize("name", MIDDLES)
def test_custom_functions_have_the_derivative_that_they_say(name: str) -> None:
    plain = fill(Net(MIDDLES[name]).double())
    module = copy.deepcopy(plain)
    tiled = TiledModule(module, tiles=(2, 3))
    for _ in range(2):
        x = torch.randn(2, 3, 20, 22, dtype=torch.float64)
        plain.zero_grad()
        module.zero_grad()
        expected, actual = plain(x), tiled(x)
        expected.square().mean().backward()
        actual.square().mean().backward()
        assert difference(actual, expected) < TOLERANCE
        for p, q in zip(plain.parameters(), module.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or q.grad is None or difference(q.grad, p.grad, 1e-3) < TOLERANCE
    assert bool(tiled.plan.barriers) == (name in WHOLE)


def test_what_does_not_fit_whole_says_how_to_declare_it() -> None:
    def step(name: str) -> None:
        image = LazyImage.from_tensor(torch.zeros(1, 3, 256, 256))
        TiledModule(Net(MIDDLES[name]), budget="1MiB")(image).sum().backward()

    with pytest.raises(BarrierError, match=r"Swish.*lightning_plugin\.elementwise"):
        step("swish")
    step("declared")


def test_a_declared_function_runs_under_autocast_as_in_pytorch() -> None:
    model = fill(Net(lambda h, scale: TiledSwish.apply(h)))
    x = torch.randn(1, 3, 20, 22)
    with torch.autocast("cpu", torch.bfloat16):
        assert TiledModule(model, tiles=2)(x).dtype == model(x).dtype
    assert check(model, x).exact


# Functions of TorchScript --------------------------------------------------------------------------------------------


@torch.jit.script
def leaky(x: Tensor, slope: float = 0.1) -> Tensor:
    if x.dim() > 2:
        return torch.where(x > 0, x, x * slope)
    return x.tanh()


@torch.jit.script
def both(x: Tensor) -> tuple[Tensor, Tensor]:
    return leaky(x, 0.3), x.mean((2, 3))


SCRIPTED: dict[str, Callable[[Tensor], Tensor]] = {
    "scripted": leaky,
    "a number by name": lambda y: leaky(y, slope=0.4),
    "of a vector": lambda y: leaky(y.mean((2, 3))),
    "two results": lambda y: both(y)[0] * both(y)[1][..., None, None],
    "traced": torch.jit.trace(lambda y: y.sigmoid() * y, torch.randn(1, 4, 8, 8)),
}


class WithScripted(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.conv, self.name = nn.Conv2d(3, 4, 3, padding=1), name

    def forward(self, x: Tensor) -> Tensor:
        return SCRIPTED[self.name](self.conv(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("name", SCRIPTED)
def test_scripted_functions_are_tiled(name: str) -> None:
    assert_exact(WithScripted(name), (1, 3, 32, 30))
    assert not make_plan(WithScripted(name), (1, 3, 32, 30), budget="64MiB").barriers
    x = torch.randn(2, 4, 8, 8)
    torch.testing.assert_close(leaky(x), torch.where(x > 0, x, x * 0.1))  # ordinary tensors are TorchScript's
