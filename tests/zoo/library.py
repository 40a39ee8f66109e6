"""Networks of timm: ConvNeXt, a ResNet with standardised weights, and one with blur pools.

Smallest side: 32 of ConvNeXt, 17 of the blur-pooled one (reflection needs a position to reflect).
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import nn

from .entry import ZooEntry


def convnext(*, in_channels: int = 3, **how: Any) -> nn.Module:
    return model("convnext").ConvNeXt(in_chans=in_channels, **how)  # type: ignore[no-any-return]


def standardised(*, in_channels: int = 3, groups: int = 32, **how: Any) -> nn.Module:
    """Big-Transfer style: standardised kernels, and a GroupNorm over the whole image before each convolution."""
    norm = partial(model("resnetv2").GroupNormAct, num_groups=groups)
    return model("resnetv2").ResNetV2(  # type: ignore[no-any-return]
        (2, 2, 2, 2), in_chans=in_channels, basic=True, bottle_ratio=1.0, norm_layer=norm, stem_type="fixed", **how
    )


def blurred(*, in_channels: int = 3, layers: tuple[int, ...] = (2, 2, 2, 2), **how: Any) -> nn.Module:
    """Anti-aliased: a fixed binomial filter with reflected borders behind each stride."""
    module = model("resnet")
    blur = import_module("timm.layers").BlurPool2d
    return module.ResNet(module.BasicBlock, layers, in_chans=in_channels, aa_layer=blur, **how)  # type: ignore[no-any-return]


def model(name: str) -> Any:
    """A module of timm's models."""
    import tests.torchvision_stub  # noqa: F401

    return import_module(f"timm.models.{name}")


_convnext: Any = partial(convnext, depths=(1, 1, 2, 1), dims=(8, 16, 32, 64), num_classes=4)
_v2: dict[str, Any] = {"use_grn": True, "ls_init_value": None}

ENTRIES = (
    # The published layer scale of 1e-6 would make every block's gradient vanish beside the head's.
    ZooEntry("convnext_tiny", partial(_convnext, ls_init_value=0.5), (2, 3, 101, 131), False, convnext, min_size=32),
    ZooEntry(
        "convnext_v2_tiny", partial(_convnext, **_v2), (2, 3, 127, 97), False, partial(convnext, **_v2), min_size=32
    ),
    ZooEntry(
        "convnext_tiny_drop_path",
        partial(_convnext, ls_init_value=0.5, drop_path_rate=0.4),
        (3, 3, 83, 71),
        False,
        partial(convnext, drop_path_rate=0.1),
        stochastic=True,
        min_size=32,
    ),
    ZooEntry(
        "standardised_resnet",
        partial(standardised, channels=(4, 8, 16, 32), stem_chs=4, groups=2, num_classes=4),
        (2, 3, 83, 97),
        False,
        partial(standardised, channels=(64, 128, 256, 512)),
    ),
    ZooEntry(
        "blur_resnet",
        partial(blurred, layers=(1, 1, 1, 1), channels=(4, 8, 8, 16), stem_width=4, num_classes=4),
        (2, 3, 73, 101),
        False,
        blurred,
        min_size=17,
    ),
) if find_spec("timm") else ()  # fmt: skip
