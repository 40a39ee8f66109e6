"""A classifier with the weights of a checkpoint, and the network that it has trained."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from wsi_trainer.errors import UserError
from wsi_trainer.models.backbones import FrozenFeatures
from wsi_trainer.models.classifier import SlideClassifier
from wsi_trainer.models.low_rank import merge_low_rank
from wsi_trainer.models.patch_encoder import PatchEncoder
from wsi_trainer.models.weights import read_checkpoint


def load_weights(model: SlideClassifier, checkpoint: Path) -> None:
    """Put the weights of a checkpoint into the model."""
    state = read_checkpoint(checkpoint)
    try:
        model.load_state_dict(state["state_dict"])
    except RuntimeError as error:
        raise UserError(
            f"{checkpoint} holds the weights of another network than the config's; use a checkpoint of this run"
        ) from error


def encoder_of(model: SlideClassifier) -> nn.Module:
    """The network that a run has trained, with low-rank matrices merged into its layers."""
    if isinstance(model.backbone, FrozenFeatures):
        raise UserError("model.backbone is FrozenFeatures: a run on features has no encoder to export")
    merge_low_rank(model.backbone)
    return model.backbone.network if isinstance(model.backbone, PatchEncoder) else model.backbone
