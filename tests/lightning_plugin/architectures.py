"""Architectures of timm, unchanged, at tiny sizes: what becomes of each under tiles."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from lightning_plugin.errors import EngineError
from tests.exactness import TOLERANCE, errors
from tests.lightning_plugin.cases import GRIDS, noting
from tests.zoo import fill


@dataclass(frozen=True)
class Architecture:
    """A name of timm's, an input that it takes, and the arguments that make it small."""

    name: str
    shape: tuple[int, ...] = (2, 3, 71, 83)
    arguments: dict[str, Any] = field(default_factory=dict)


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
    Architecture(
        "swin_tiny_patch4_window7_224", (2, 3, 64, 96), {"img_size": (64, 96), "window_size": 2, "depths": (2, 2)}
    ),
)  # fmt: skip
#: The small and quick ones, which the sampled run tests.
SAMPLED = (
    "resnet18",
    "mobilenetv3_small_050",
    "convnextv2_atto",
    "dla46_c",
    "skresnet18",
)


def examine(timm: ModuleType, architecture: Architecture) -> dict[str, Any]:
    """``pass``: tiled throughout and exact; ``barrier``: exact, some operators run whole; ``error``; ``wrong``."""
    torch.manual_seed(0)
    arguments = {"pretrained": False, **architecture.arguments}
    if "features_only" not in arguments:
        arguments |= {"num_classes": 3, "drop_rate": 0.0}  # dropout's masks are drawn otherwise in plain PyTorch
    net = fill(timm.create_model(architecture.name, **arguments).double()).train()
    settings = noting(*GRIDS[0])
    row: dict[str, Any] = {"name": architecture.name, "shape": list(architecture.shape)}
    try:
        largest = max(errors(net, architecture.shape, settings=settings).values())
    except EngineError as error:
        return {**row, "result": "error", "message": str(error)}
    barriers = sorted({b.split(" in ")[0].split(": ")[0] for b in settings.noted})
    result = "wrong" if not largest < TOLERANCE else "barrier" if barriers else "pass"
    return {**row, "result": result, "error": largest, "barriers": barriers}
