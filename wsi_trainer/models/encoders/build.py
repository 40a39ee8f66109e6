"""The network of an encoder, with random weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wsi_trainer.errors import UserError
from wsi_trainer.models.backbones.timm import import_timm, timm_network
from wsi_trainer.models.encoders.entry import Encoder
from wsi_trainer.models.encoders.stem import ConvolutionStem
from wsi_trainer.models.encoders.tokens import (
    AttentionPooler,
    ClassAndMean,
    ClassToken,
    PlainAttentionPooler,
    Pooled,
)


def build_encoder(encoder: Encoder, size: int | None = None) -> nn.Module:
    """The network of an encoder: from patches, (K, 3, size, size), to a vector for each.

    Args:
        encoder: Which.
        size: Pixels along a side of a patch; by default what the encoder was trained on.
    """
    return _MAKERS[encoder.maker](encoder, size or encoder.size)


def shapes_of(network: nn.Module) -> str:
    """A checksum of the names and shapes of all that a network has learnt."""
    rows = sorted(f"{name} {tuple(value.shape)}" for name, value in network.state_dict().items())
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16]


def from_transformers(folder: Path, size: int) -> nn.Module:
    """The vision model that the config.json of a folder describes; code that lies beside it is not run.

    Args:
        folder: Has a config.json, as `save_pretrained` writes it.
        size: Pixels along a side of a patch.
    """
    transformers = import_transformers()
    if not (folder / "config.json").is_file():
        raise UserError(f"model.backbone.network: {folder} has no config.json, which describes a model of transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config.image_size = size
        return ClassToken(transformers.AutoModel.from_config(config, trust_remote_code=False))
    except (ValueError, KeyError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"model.backbone.network: {folder}/config.json describes no model of transformers ({reason})"
        ) from error


def import_transformers() -> Any:
    """The package, or an error that says how to get it."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install 'wsi-trainer[encoders]'") from error
    return transformers


def _timm(encoder: Encoder, size: int) -> nn.Module:
    arguments = _classes(encoder.arguments)
    sized = {} if encoder.architecture.startswith("resnet") else {"img_size": size}
    trunk = timm_network(encoder.architecture, **sized, **arguments)
    return ClassAndMean(trunk, int(trunk.num_prefix_tokens)) if encoder.vector == "class and mean" else trunk  # type: ignore[arg-type]


def _classes(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """timm's arguments, with its own layers in place of their names."""
    made = dict(arguments)
    if "mlp_layer" in made:
        made["mlp_layer"] = getattr(import_timm().layers, made["mlp_layer"])
    return made


def _transformers(encoder: Encoder, size: int) -> nn.Module:
    transformers = import_transformers()
    config = getattr(transformers, f"{encoder.architecture}Config")(image_size=size, **encoder.arguments)
    pooling = {"add_pooling_layer": False} if encoder.architecture == "ViT" else {}
    return ClassToken(getattr(transformers, f"{encoder.architecture}Model")(config, **pooling))


def _conch(encoder: Encoder, size: int) -> nn.Module:
    trunk = timm_network(encoder.architecture, img_size=size, global_pool="", **encoder.arguments)
    pooler = AttentionPooler if encoder.maker == "conch" else PlainAttentionPooler
    return Pooled(trunk, pooler(encoder.width, int(trunk.num_features)), encoder.width)  # type: ignore[arg-type]


def _ctranspath(encoder: Encoder, size: int) -> nn.Module:
    return timm_network(encoder.architecture, img_size=size, embed_layer=ConvolutionStem)


_MAKERS: dict[str, Callable[[Encoder, int], nn.Module]] = {
    "timm": _timm,
    "transformers": _transformers,
    "conch": _conch,
    "conch 1.5": _conch,
    "ctranspath": _ctranspath,
}


def outline(encoder: Encoder) -> nn.Module:
    """The network of an encoder without memory for its parameters."""
    with torch.device("meta"):
        return build_encoder(encoder)
