"""Architectures of timm, unchanged, at tiny sizes: what becomes of each under tiles."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_plugin.errors import EngineError
from tests.exactness import TOLERANCE, errors
from tests.lightning_plugin.bags import by_view
from tests.lightning_plugin.cases import GRIDS, noting
from tests.zoo import fill


@dataclass(frozen=True)
class Architecture:
    """A name of timm's, an input that it takes, and the arguments that make it small; with ``patch``, it encodes
    patches of that side, which are cut out of the image, and their mean is taken."""

    name: str
    shape: tuple[int, ...] = (2, 3, 71, 83)
    arguments: dict[str, Any] = field(default_factory=dict)
    patch: int = 0

    @property
    def label(self) -> str:
        return f"{self.name}, patches" if self.patch else self.name


class Patched(nn.Module):
    """An encoder of an image's patches."""

    def __init__(self, encoder: nn.Module, side: int) -> None:
        super().__init__()
        self.encoder, self.side = encoder, side

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(by_view(x, self.side)).mean(0, keepdim=True)  # type: ignore[no-any-return]


def small(name: str, *shape: int, **arguments: Any) -> Architecture:
    """A transformer of two blocks that is told the size of its images."""
    return Architecture(name, shape, {"img_size": shape[2:], "depth": 2, **arguments})


def narrow(name: str, *shape: int, **arguments: Any) -> Architecture:
    """The same, of a network that is wide."""
    return small(name, *shape, embed_dim=96, num_heads=4, **arguments)


def encoder(name: str, side: int, **arguments: Any) -> Architecture:
    """A transformer as an encoder of patches."""
    shape = (2, 3, 3 * side, 2 * side)
    return Architecture(name, shape, {"img_size": side, **arguments}, side)


def features(name: str) -> Architecture:
    """A network without its head of a hundred million parameters."""
    return Architecture(name, (2, 3, 67, 79), {"features_only": True})


ARCHITECTURES = (
    Architecture("resnet18"),
    Architecture("resnet26d"),
    Architecture("seresnext26d_32x4d"),
    Architecture("skresnet18"),
    Architecture("res2net50_14w_8s"),
    Architecture("resnest14d"),
    Architecture("convnext_atto"),
    Architecture("convnextv2_atto"),
    Architecture("efficientnet_lite0"),
    Architecture("tf_efficientnet_b0"),
    Architecture("mobilenetv2_050"),
    Architecture("mobilenetv3_small_050"),
    Architecture("mobilenetv4_conv_small_050"),
    Architecture("mobileone_s0"),
    Architecture("densenet121"),
    Architecture("inception_v3", (2, 3, 97, 89)),
    Architecture("inception_next_atto"),
    features("vgg11_bn"),
    Architecture("regnetx_002"),
    Architecture("regnety_002"),
    Architecture("cs3darknet_focus_s", (2, 3, 70, 86)),
    Architecture("cspresnet50"),
    Architecture("hrnet_w18_small", (2, 3, 64, 96)),
    Architecture("dla46_c", (2, 3, 64, 96)),
    Architecture("eca_nfnet_l0"),
    Architecture("nf_resnet26"),
    Architecture("ghostnet_050"),
    Architecture("repvgg_a0"),
    Architecture("xception41"),
    Architecture("ese_vovnet19b_slim"),
    Architecture("mixnet_s"),
    Architecture("rexnet_100", (2, 3, 127, 101)),  # smaller, and its own rounding errors exceed the tolerance
    Architecture("poolformerv2_s12"),
    Architecture("mambaout_femto", (2, 3, 67, 75)),
    Architecture("edgenext_xx_small", (2, 3, 64, 96)),
    Architecture("vit_tiny_patch16_224", (2, 3, 64, 80), {"img_size": (64, 80), "depth": 3}),
    small("vit_small_patch16_224", 3, 3, 32, 32, patch_size=8),
    narrow("vit_base_patch16_224", 2, 3, 32, 48),
    small("vit_small_patch16_18x2_224", 2, 3, 32, 32),
    small("vit_small_patch14_reg4_dinov2", 2, 3, 56, 42),
    narrow("vit_giant_patch14_dinov2", 2, 3, 28, 42),
    Architecture("vit_small_patch14_dinov2", (2, 3, 42, 56), {"img_size": 28, "depth": 2, "dynamic_img_size": True}),
    narrow("vit_base_patch16_rope_reg1_gap_256", 2, 3, 64, 64),
    narrow("vit_so150m_patch16_reg4_map_256", 2, 3, 32, 48),
    small("vit_relpos_small_patch16_224", 2, 3, 32, 48),
    small("deit3_small_patch16_224", 2, 3, 32, 48),
    small("eva02_tiny_patch14_224", 2, 3, 28, 42),
    narrow("eva02_base_patch14_224", 2, 3, 28, 28),
    narrow("beit_base_patch16_224", 2, 3, 32, 32),
    small("cait_xxs24_224", 2, 3, 32, 32),
    small("convit_tiny", 2, 3, 32, 32),
    Architecture("xcit_nano_12_p16_224", (2, 3, 32, 48), {"depth": 2}),
    Architecture("swinv2_tiny_window8_256", (2, 3, 64, 64), {"img_size": 64, "window_size": 4, "depths": (2, 2)}),
    Architecture("swinv2_cr_tiny_224", (2, 3, 64, 64), {"img_size": 64, "window_size": 4, "depths": (2, 2)}),
    Architecture("maxvit_pico_rw_256", (2, 3, 64, 64), {"img_size": 64}),
    Architecture("maxxvit_rmlp_nano_rw_256", (2, 3, 64, 64), {"img_size": 64}),
    Architecture("coatnet_pico_rw_224", (2, 3, 64, 64), {"img_size": 64}),
    Architecture("coatnet_nano_rw_224", (2, 3, 64, 64), {"img_size": 64}),
    Architecture("pvt_v2_b0", (2, 3, 64, 96)),
    Architecture("pvt_v2_b1", (2, 3, 64, 64)),
    Architecture("levit_128s", (4, 3, 64, 64), {"img_size": 64}),
    Architecture("mobilevit_xxs", (2, 3, 64, 64)),
    Architecture("mobilevitv2_050", (2, 3, 64, 64)),
    Architecture("twins_svt_small", (2, 3, 64, 64), {"img_size": 64}),
    Architecture("hiera_tiny_224", (1, 3, 64, 64), {"img_size": 64}),
    Architecture("davit_tiny", (2, 3, 64, 64)),
    Architecture("nest_tiny_jx", (2, 3, 64, 64), {"img_size": 64}),
    Architecture("gcvit_xxtiny", (2, 3, 64, 64), {"img_size": 64}),
    Architecture("visformer_tiny", (2, 3, 64, 64), {"img_size": 64}),
    encoder("vit_tiny_patch16_224", 32, depth=2),
    encoder("vit_small_patch14_reg4_dinov2", 28, depth=2),
    encoder("eva02_tiny_patch14_224", 28, depth=2),
    encoder("vit_relpos_small_patch16_224", 32, depth=2),
    encoder("swin_tiny_patch4_window7_224", 32, window_size=2, depths=(2, 2)),
    Architecture("pvt_v2_b0", (1, 3, 96, 64), {}, 32),
    Architecture("resnet18", (1, 3, 128, 96), {}, 32),
    Architecture(
        "swin_tiny_patch4_window7_224", (2, 3, 64, 96), {"img_size": (64, 96), "window_size": 2, "depths": (2, 2)}
    ),
)  # fmt: skip
#: The small and quick ones, which the sampled run tests.
SAMPLED = (
    "resnet18",
    "mobilenetv3_small_050",
    "convnextv2_atto",
    "vit_tiny_patch16_224",
    "vit_tiny_patch16_224, patches",
    "vit_small_patch14_reg4_dinov2",
    "swin_tiny_patch4_window7_224",
)


def examine(timm: ModuleType, architecture: Architecture) -> dict[str, Any]:
    """``pass``: tiled throughout and exact; ``barrier``: exact, some operators run whole; ``error``; ``wrong``."""
    torch.manual_seed(0)
    arguments = {"pretrained": False, **architecture.arguments}
    if "features_only" not in arguments:
        arguments |= {"num_classes": 3, "drop_rate": 0.0}  # dropout's masks are drawn otherwise in plain PyTorch
    net = timm.create_model(architecture.name, **arguments)
    net = fill((Patched(net, architecture.patch) if architecture.patch else net).double()).train()
    engine = noting(*GRIDS[0])
    row: dict[str, Any] = {"name": architecture.label, "shape": list(architecture.shape)}
    try:
        largest = max(errors(net, architecture.shape, engine=engine).values())
    except EngineError as error:
        return {**row, "result": "error", "message": str(error)}
    barriers = sorted({b.split(" in ")[0].split(": ")[0] for b in engine.noted})
    result = "wrong" if not largest < TOLERANCE else "barrier" if barriers else "pass"
    return {**row, "result": result, "error": largest, "barriers": barriers}
