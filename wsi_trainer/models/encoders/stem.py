"""The convolutions before CTransPath's windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class ConvolutionStem(nn.Module):
    """Two convolutions of stride 2 with BatchNorm, and one of 1 × 1: from pixels to a map of a quarter of their side.

    It stands where timm's Swin transformer has its patch embedding, and is called as that is.
    """

    def __init__(
        self,
        img_size: int = 224,
        patch_size: int = 4,
        in_chans: int = 3,
        embed_dim: int = 96,
        norm_layer: Callable[[int], nn.Module] | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        if patch_size != 4:
            raise ValueError(f"patch_size is {patch_size}; the stem makes positions of 4 × 4 pixels")
        self.grid_size = (img_size // patch_size, img_size // patch_size)
        narrow, wide = embed_dim // 8, embed_dim // 4
        self.proj = nn.Sequential(
            nn.Conv2d(in_chans, narrow, 3, 2, 1, bias=False),
            nn.BatchNorm2d(narrow),
            nn.ReLU(),
            nn.Conv2d(narrow, wide, 3, 2, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU(),
            nn.Conv2d(wide, embed_dim, 1),
        )
        self.norm = nn.Identity() if norm_layer is None else norm_layer(embed_dim)

    def forward(self, patches: Tensor) -> Tensor:
        return self.norm(self.proj(patches).permute(0, 2, 3, 1))
