"""What of a backbone is trained."""

from __future__ import annotations

from typing import Literal

from torch import nn

from wsi_trainer.models.low_rank import add_low_rank
from wsi_trainer.models.network_facts import stages_of

Trained = Literal["all", "last", "lora", "norms", "none"]
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm, nn.RMSNorm)


def train_only(backbone: nn.Module, what: Trained, last: int, rank: int, alpha: float) -> list[nn.Module]:
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
