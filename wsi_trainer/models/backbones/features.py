"""`FrozenFeatures`: what stands for an encoder whose features were made before."""

from __future__ import annotations

from torch import Tensor, nn

from wsi_trainer.errors import UserError


class FrozenFeatures(nn.Module):
    """No encoder at all: the head pools features that are read from files (`data.features`).

    Attributes:
        prepared: Says that the input is features, which no colours are normalised of.
    """

    prepared = True
    stride = 1

    def __init__(self, width: int = 1024) -> None:
        """Say what the files hold.

        Args:
            width: Entries of the vector of a patch, such as 1536.
        """
        super().__init__()
        if width < 1:
            raise ValueError(f"width is {width}; it must be at least 1")
        self.out_channels = width

    def forward(self, features: Tensor) -> Tensor:
        if features.shape[1] != self.out_channels:
            raise UserError(
                f"a file of features has {features.shape[1]} for each patch, and model.backbone.width is "
                f"{self.out_channels}; set it to that"
            )
        return features

    def stages(self) -> list[nn.Module]:
        """None: nothing is trained here."""
        return []
