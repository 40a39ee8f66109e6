"""Convolutions without a result: in backward, only their gradients are computed.

[Note: unread] Backward recomputes a tile for the tensors that autograd saves. A convolution saves its input and not its
result, so the result of the last convolution of a segment, the stored map, is not read again. In its place stands a
tensor without data that has the convolution's gradients. The kernel is that which autograd would call, so gradients are
the same to the bit. If a graph is pulled back several times (once for vectors, once for each distinct input tile), the
gradient of the weight is computed in the pass that asks for it only, which is half of the work.
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
    """Arguments of a convolution other than tensors."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    groups: int

    def shape(self, x: Tensor, weight: Tensor) -> tuple[int, ...]:
        """Return the shape of the result."""
        sides = zip(x.shape[2:], weight.shape[2:], self.stride, self.padding, self.dilation, strict=True)
        if self.transposed:
            made = [(size - 1) * s - 2 * p + d * (k - 1) + 1 for size, k, s, p, d in sides]
            return (x.shape[0], weight.shape[1] * self.groups, *made)
        made = [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in sides]
        return (x.shape[0], weight.shape[0], *made)


def unread(x: Tensor, weight: Tensor, bias: Tensor | None, how: ConvolutionArguments) -> Tensor:
    """Return a tensor with the shape and the gradients of a convolution's result, without values."""
    # Views: autograd does not tell if a pass wants the gradient of a leaf.
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
    """Give the result of a convolution, whose bias was detached, the gradient of the bias.

    On a CPU, a convolution sums the bias's gradient in float32, position by position, which loses two digits for smooth
    cotangents. PyTorch's sum adds in pairs.
    """
    return BiasGradient.apply(made, bias)  # type: ignore[no-any-return, no-untyped-call]


class BiasGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: Tensor, bias: Tensor) -> Tensor:
        if 0 in made.stride():  # the stand-in of `unread`: no operator writes to it
            return made.view_as(made)
        ctx.mark_dirty(made)  # not a view, so that an activation may write to it
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.sum([0, *range(2, gradient.dim())])
