"""Convolutions whose result nobody reads, so that only their gradients are computed.

[Note: unread] In backward a tile is computed again for what autograd keeps of it. Of the convolution that makes a
stored map autograd keeps what the convolution has read, and nobody reads what it makes: there is none of it, only a
place in the graph. Gradients come from the very kernel that autograd would call, so they are the same to the bit. A
graph that is pulled back several times, for the vectors once and for what was read as often as that differs, is not
asked for the gradient of the weight each time: half of the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.private import first_order, is_scheduled

aten = torch.ops.aten


@dataclass(frozen=True)
class ConvolutionArguments:
    """Arguments of a convolution beside its tensors."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    groups: int

    def shape(self, x: Tensor, weight: Tensor) -> tuple[int, ...]:
        """The shape of the result."""
        sides = zip(x.shape[2:], weight.shape[2:], self.stride, self.padding, self.dilation, strict=True)
        if self.transposed:
            made = [(size - 1) * s - 2 * p + d * (k - 1) + 1 for size, k, s, p, d in sides]
            return (x.shape[0], weight.shape[1] * self.groups, *made)
        made = [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in sides]
        return (x.shape[0], weight.shape[0], *made)


def unread(x: Tensor, weight: Tensor, bias: Tensor | None, how: ConvolutionArguments) -> Tensor:
    """Stand-in for the result of a convolution: of its shape, with its gradients, and no values."""
    # Views: of a leaf itself autograd does not say whether a pass wants its gradient.
    own = [None if t is None else t.view_as(t) for t in (weight, bias)]
    return Unread.apply(x, *own, how)  # type: ignore[no-any-return, no-untyped-call]


class Unread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: ConvolutionArguments) -> Tensor:
        ctx.how = how
        ctx.of_bias = None if bias is None else list(bias.shape)
        ctx.save_for_backward(x, weight)
        return x.new_zeros(()).expand(how.shape(x, weight))

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        how: ConvolutionArguments = ctx.how
        x, weight = ctx.saved_tensors
        vectors = [is_scheduled(maker) for maker, _ in ctx.next_functions[1:]]
        wanted = [ctx.needs_input_grad[0], *vectors, *[False] * (2 - len(vectors))]
        found = aten.convolution_backward(
            gradient, x, weight, ctx.of_bias, how.stride, how.padding, how.dilation, how.transposed,
            [0] * len(how.stride), how.groups, wanted,
        )  # fmt: skip
        return (*found, None)


def with_bias_gradient(made: Tensor, bias: Tensor) -> Tensor:
    """Add the gradient of a bias that autograd does not know of to the result of a convolution.

    On a CPU, convolutions add a bias's gradient up in float32, one position after the other: smooth cotangents cost two
    digits. PyTorch's sum adds in pairs.
    """
    return BiasGradient.apply(made, bias)  # type: ignore[no-any-return, no-untyped-call]


class BiasGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: Tensor, bias: Tensor) -> Tensor:
        if 0 in made.stride():  # a number that stands for a result: nobody writes to it
            return made.view_as(made)
        ctx.mark_dirty(made)  # no view, so that an activation may write to it
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.sum([0, *range(2, gradient.dim())])
