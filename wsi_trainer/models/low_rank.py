"""LoRA: linear layers that learn by a matrix of low rank beside their own (Hu et al., 2021)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class LowRankLinear(nn.Linear):
    """W x + b + (alpha / rank) · up · down · x, of which only `up` and `down` are trained.

    `up` begins as zeros, so that the layer begins as it was; W and b keep their names.
    """

    def __init__(self, layer: nn.Linear, rank: int, alpha: float) -> None:
        """Take the place of a layer.

        Args:
            layer: Its weights are used, and not copied.
            rank: Rows of `down`.
            alpha: How much the learnt part counts, times rank.
        """
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.scale = alpha / rank
        self.down = nn.Parameter(layer.weight.new_empty(rank, layer.in_features))
        self.up = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        own = functional.linear(x, self.weight, self.bias)
        return own + self.scale * functional.linear(functional.linear(x, self.down), self.up)


def add_low_rank(network: nn.Module, rank: int, alpha: float) -> list[LowRankLinear]:
    """Let each linear layer of a network learn in low rank, and nothing else of it; returns these layers.

    Layers that PyTorch's own attention and transformer read without calling them stay as they are.
    """
    network.requires_grad_(False)
    made = []
    for parent in list(network.modules()):
        if isinstance(parent, nn.TransformerEncoderLayer):
            continue
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear:
                made.append(LowRankLinear(layer, rank, alpha))
                setattr(parent, name, made[-1])
    if not made:
        raise ValueError(f"model.trained is lora, and {type(network).__name__} has no linear layer to change")
    return made


@torch.no_grad()
def merge_low_rank(network: nn.Module) -> None:
    """Put what was learnt in low rank into the layers' own weights: the network computes the same with plain layers."""
    for parent in list(network.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, LowRankLinear):
                plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
                layer.weight += layer.scale * layer.up @ layer.down
                plain.weight, plain.bias = layer.weight, layer.bias
                setattr(parent, name, plain)


def low_rank_names(module: nn.Module) -> set[str]:
    """The names of what is learnt in low rank, which no file of another has."""
    layers = {name for name, part in module.named_modules() if isinstance(part, LowRankLinear)}
    return {f"{name}.{own}" for name in layers for own in ("down", "up")}
