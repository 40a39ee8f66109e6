"""Fine-tuning: trained and frozen parts of a backbone, LoRA, learning rates of the stages, and their schedule."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from wsi_trainer.models.backbones import stages_of


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
        raise ValueError(f"model.finetune is lora, and {type(network).__name__} has no linear layer to change")
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


FineTune = Literal["all", "last", "lora", "norms", "none"]
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm, nn.RMSNorm)


def train_only(backbone: nn.Module, what: FineTune, last: int, rank: int, alpha: float) -> list[nn.Module]:
    """Exclude from training what is not asked for; returns the parts that keep their statistics.

    Args:
        backbone: The network.
        what: all of it, its last stages, LoRA beside each linear layer, norms and biases, or none.
        last: How many stages, with last.
        rank: Of LoRA.
        alpha: Of LoRA.
    """
    if what == "all":
        return []
    if what == "lora":
        add_low_rank(backbone, rank, alpha)
        return []
    backbone.requires_grad_(False)
    if what == "last":
        stages = stages_of(backbone)
        if not 0 < last < len(stages):
            raise ValueError(
                f"model.last_stages is {last}; the backbone {type(backbone).__name__} has {len(stages)} stages"
            )
        for stage in stages[-last:]:
            stage.requires_grad_(True)
        return stages[:-last]
    if what == "norms":
        for part in backbone.modules():
            for name, parameter in part.named_parameters(recurse=False):
                if isinstance(part, NORMS) or name.endswith("bias"):
                    parameter.requires_grad_(True)
        return []
    return [backbone]


def freeze(backbone: nn.Module, count: int) -> list[nn.Module]:
    """Exclude the first stages of a backbone from training; returns them."""
    stages = stages_of(backbone)
    if not 0 <= count <= len(stages):
        raise ValueError(
            f"model.frozen_stages is {count}; the backbone {type(backbone).__name__} has {len(stages)} stages"
        )
    for stage in stages[:count]:
        stage.requires_grad_(False)
    return stages[:count]


def parameter_groups(
    module: nn.Module, backbones: list[nn.Module], rate: float, weight_decay: float, layer_decay: float
) -> list[dict[str, Any]]:
    """Groups for an optimizer, each with its learning rate and weight decay.

    The last stage of a backbone learns at `layer_decay` of the rate of the head, the one before at `layer_decay` of
    that, and so on. Vectors (biases and the like) are not decayed.
    """
    depth: dict[int, int] = {}  # how many stages lie between a parameter and the head, by identity
    for backbone in backbones:
        stages = stages_of(backbone)
        depth |= {id(p): len(stages) for p in backbone.parameters()}  # what belongs to no stage comes first
        for index, stage in enumerate(stages):
            depth |= {id(p): len(stages) - index for p in stage.parameters()}
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for p in module.parameters():
        if p.requires_grad:
            place, decayed = depth.get(id(p), 0), p.ndim >= 2
            new = {
                "params": [],
                "lr": rate * layer_decay**place,
                "weight_decay": weight_decay if decayed else 0.0,
            }
            groups.setdefault((place, decayed), new)["params"].append(p)
    return [groups[key] for key in sorted(groups, key=lambda key: (-key[0], not key[1]))]


def apart(groups: list[dict[str, Any]], own: list[nn.Parameter], rate: float) -> list[dict[str, Any]]:
    """The groups, of which some parameters are taken out into one of their own, not decayed, at the end.

    Args:
        groups: Those of `parameter_groups`.
        own: The parameters.
        rate: Their learning rate.
    """
    taken = {id(p) for p in own}
    others = [{**group, "params": [p for p in group["params"] if id(p) not in taken]} for group in groups]
    return [*(group for group in others if group["params"]), {"params": own, "lr": rate, "weight_decay": 0.0}]


def warmup_cosine(optimizer: torch.optim.Optimizer, steps: int, warmup: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Rise linearly over `warmup` steps, then fall along half a cosine to 1 % of the peak at `steps`."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = (step - warmup) / max(steps - warmup, 1)
        return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
