"""`PatchEncoder`: a network for small images, as the backbone of a bag of patches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from wsi_trainer.errors import UserError
from wsi_trainer.models.backbones import make_backbone, timm_network
from wsi_trainer.models.encoders import Colours, Encoder, build_encoder, encoder_named, from_transformers, is_encoder
from wsi_trainer.models.network_facts import answer, blocks_as_stages, stages_of


class PatchEncoder(nn.Module):
    """Encodes each patch of a bag (`data.patches`) to one vector; the head then pools over the patches.

    From (K, 3, size, size) to a map (1, out_channels, K, 1), of which each position is a patch: every head works on it.
    Where the network returns a map of features for a patch, its mean is the vector.

    Attributes:
        bags: Says that the input is a bag and not an image.
    """

    bags = True
    stride = 1

    def __init__(
        self,
        network: nn.Module | str | None = None,
        size: int | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """Build the encoder.

        Args:
            network: Any network that makes a vector or a map of features of an image: a published encoder such as
                uni2-h (`wsi-train doctor --encoders` lists them), timm:NAME (ViTs too), transformers:FOLDER with the
                config.json of a vision model, a class of this package such as ResNet, or the import path of any other;
                a small VGG by default.
            size: Pixels along a side of a patch, as `data.patches.size`; by default what a published encoder was
                trained on, or 224.
            arguments: Further arguments of a network of timm, such as img_size or dynamic_img_size.
        """
        super().__init__()
        kind, _, named = network.partition(":") if isinstance(network, str) else ("", "", "")
        if arguments and kind != "timm":
            raise ValueError("model.backbone.arguments are those of a network of timm; give others where it is named")
        self.published = encoder_named(kind) if is_encoder(kind) or (kind and not named and "." not in kind) else None
        self.size = size or (224 if self.published is None else self.published.size)
        if self.published is not None:
            self.network = _built(self.published, self.size)
        elif kind == "transformers":
            self.network = from_transformers(Path(named), self.size)
        else:
            self.network = timm_network(named, **(arguments or {})) if kind == "timm" else make_backbone(network)
        self.out_channels = _length_of_vector(self.network, self.size)

    @property
    def colours(self) -> tuple[Colours, Colours] | None:
        """Mean and standard deviation of each colour that a published encoder was trained with."""
        return None if self.published is None else self.published.colours

    def forward(self, patches: Tensor) -> Tensor:
        vectors = self.network(patches)
        if vectors.ndim == 4:
            vectors = vectors.mean(dim=(2, 3))
        return vectors.t()[None, :, :, None]

    def stages(self) -> list[nn.Module]:
        """The stages of the network; each block of a ViT is one."""
        own = callable(getattr(self.network, "stages", None))
        return stages_of(self.network) if own else blocks_as_stages(self.network)


def _built(encoder: Encoder, size: int) -> nn.Module:
    """The network of a published encoder; an error where it takes no patches of this size."""
    try:
        return build_encoder(encoder, size)
    except (AssertionError, ValueError, RuntimeError) as error:
        raise UserError(
            f"model.backbone: {encoder.name} takes no patches of {size} × {size} ({error}); it was trained on "
            f"{encoder.size} × {encoder.size}"
        ) from error


def _length_of_vector(network: nn.Module, size: int) -> int:
    """How long a patch's vector is: what the network answers to two of them."""
    name = type(network).__name__
    try:
        out = answer(network, 2, size)
    except Exception as error:  # the network's own code: whatever it raises, it does not take such a patch
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"model.backbone: the network {name} does not take patches of {size} × {size} ({reason}); set "
            "model.backbone.size and data.patches.size to what it takes, or give a ViT of timm the argument img_size"
        ) from error
    if not isinstance(out, Tensor) or out.ndim not in (2, 4) or out.shape[0] != 2:
        returned = f"a tensor of shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
        raise UserError(
            f"model.backbone: the network {name} returns {returned} for two patches; it must return a vector for each, "
            "(patches, features), or a map; wrap it in a module that picks one"
        )
    return int(out.shape[1])
