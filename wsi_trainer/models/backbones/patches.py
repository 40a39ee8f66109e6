"""`PatchEncoder`: a network for small images, as the backbone of a bag of patches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from wsi_trainer.errors import UserError
from wsi_trainer.models.backbones.base import answer, stages_of
from wsi_trainer.models.backbones.named import make_backbone
from wsi_trainer.models.backbones.timm import timm_network


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
        size: int = 224,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """Build the encoder.

        Args:
            network: Any network that makes a vector or a map of features of an image: timm:NAME (ViTs too), a class of
                this package such as ResNet, or the import path of any other; a small VGG by default.
            size: Pixels along a side of a patch, as `data.patches.size`.
            arguments: Further arguments of a network of timm, such as img_size or dynamic_img_size.
        """
        super().__init__()
        named = network.removeprefix("timm:") if isinstance(network, str) and network.startswith("timm:") else None
        if arguments and named is None:
            raise ValueError("model.backbone.arguments are those of a network of timm; give others where it is named")
        self.network = make_backbone(network) if named is None else timm_network(named, **(arguments or {}))
        self.size = size
        self.out_channels = _length_of_vector(self.network, size)

    def forward(self, patches: Tensor) -> Tensor:
        vectors = self.network(patches)
        if vectors.ndim == 4:
            vectors = vectors.mean(dim=(2, 3))
        return vectors.t()[None, :, :, None]

    def stages(self) -> list[nn.Module]:
        """The stages of the network."""
        return stages_of(self.network)


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
