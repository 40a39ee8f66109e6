"""Which parameters are trained, and how fast each of them."""

from __future__ import annotations

from typing import Any

from torch import nn

from wsi_trainer.models.network_facts import stages_of


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
