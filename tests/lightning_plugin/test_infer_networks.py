"""`infer` on dense networks of others, unchanged, at small sizes: timm's features, segmentation-models-pytorch's and
transformers' maps."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_plugin import BudgetError, TiledModule, infer, make_plan
from lightning_plugin.private import tree_leaves
from tests.lightning_plugin.planner.peaks import CLEAR
from tests.lightning_plugin.planner.test_process_peak import ROOT, holds
from tests.zoo import fill

pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("timm", "segmentation_models_pytorch", "transformers"))), reason="they are not installed"
)


@dataclass(frozen=True)
class Dense:
    """A network's name in its library, the size of an image that it takes, and the arguments that make it small."""

    package: str
    name: str
    size: tuple[int, int] = (96, 128)
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return "-".join((self.package, self.name, *(str(v) for v in self.arguments.values() if isinstance(v, str))))

    def sinks(self, found: list[Tensor]) -> Any:
        return found if len(found) > 1 or self.package != "smp" else found[0]

    def image(self) -> Tensor:
        return torch.randn(1, 3, *self.size, dtype=torch.float64)

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        import tests.torchvision_stub  # noqa: F401

        if self.package == "timm":
            make = import_module("timm").create_model
            net: nn.Module = make(self.name, pretrained=False, features_only=True, **self.arguments)
        elif self.package == "smp":
            make = getattr(import_module("segmentation_models_pytorch"), self.name)
            net = make(**{"encoder_name": "tu-resnet18", "encoder_weights": None, "classes": 5, **self.arguments})
        else:
            transformers = import_module("transformers")
            kind = getattr(transformers, self.name)
            arguments = dict(self.arguments)
            backbone = arguments.pop("backbone", None)
            if backbone is not None:
                config, given = backbone
                arguments["backbone_config"] = getattr(transformers, config)(**given)
            net = Maps(kind(kind.config_class(**arguments)))
        return fill(net.double()).eval()


class Maps(nn.Module):
    """The maps among the results of a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> list[Tensor]:
        return [t for t in self.model(x).values() if isinstance(t, Tensor)]


SQUARE = (96, 96)
STEPS: dict[str, Any] = {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2]}
NECKS: dict[str, Any] = {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 32]}
CONVNEXT = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32], "out_features": [f"stage{i}" for i in range(1, 5)]}
SWIN = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}

NETWORKS = (
    *(Dense("timm", name) for name in (
        "resnet18", "resnet26d", "seresnext26d_32x4d", "skresnet18", "res2net50_14w_8s", "resnest14d", "convnext_atto",
        "convnextv2_atto", "efficientnet_lite0", "tf_efficientnet_b0", "mobilenetv2_050", "mobilenetv3_small_050",
        "mobilenetv4_conv_small_050", "densenet121", "inception_v3", "vgg11_bn", "regnetx_002", "regnety_002",
        "cs3darknet_focus_s", "cspresnet50", "hrnet_w18_small", "dla46_c", "eca_nfnet_l0", "nf_resnet26",
        "ghostnet_050", "repvgg_a0", "xception41", "ese_vovnet19b_slim", "mixnet_s", "rexnet_100", "poolformerv2_s12",
        "edgenext_xx_small", "pvt_v2_b0", "mobilevit_xxs", "resnetv2_50x1_bit", "davit_tiny",
    )),
    Dense("timm", "vit_tiny_patch16_224", SQUARE, {"img_size": 96, "depth": 3}),
    Dense("timm", "swinv2_tiny_window8_256", (64, 64), {"img_size": 64, "window_size": 4, "depths": (2, 2, 2, 2)}),
    *(Dense("smp", name) for name in (
        "Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "DeepLabV3", "DeepLabV3Plus", "UPerNet",
        "Segformer",
    )),
    *(Dense("smp", "Unet", arguments={"encoder_name": encoder}) for encoder in (
        "efficientnet-b0", "mit_b0", "tu-mobilenetv2_050", "tu-densenet121", "tu-seresnext26d_32x4d",
        "tu-convnext_atto", "tu-regnetx_002",
    )),
    Dense("smp", "PAN", (256, 256)),
    Dense("smp", "Unet", arguments={"decoder_attention_type": "scse"}),
    Dense("smp", "FPN", arguments={"encoder_name": "mit_b0"}),
    Dense("transformers", "SegformerForSemanticSegmentation", arguments={**STEPS, "decoder_hidden_size": 16}),
    Dense("transformers", "MobileViTForSemanticSegmentation", arguments={**NECKS, "aspp_out_channels": 16}),
    Dense("transformers", "MobileNetV2ForSemanticSegmentation", arguments={"depth_multiplier": 0.25}),
    Dense("transformers", "GLPNForDepthEstimation", arguments={**STEPS, "decoder_hidden_size": 16}),
    Dense("transformers", "UperNetForSemanticSegmentation",
          arguments={"backbone": ("ConvNextConfig", CONVNEXT), "hidden_size": 16, "auxiliary_in_channels": 16}),
    Dense("transformers", "Swin2SRForImageSuperResolution", (32, 40), {**SWIN, "image_size": 32, "upscale": 2}),
)  # fmt: skip
#: Two that take little time; the others run with ``--full``.
SAMPLED = ("timm-resnetv2_50x1_bit", "smp-Linknet")


def error(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right.double()).abs().max() / right.double().abs().max().clamp(min=1e-30))


def like(results: list[Tensor]) -> list[Tensor]:
    return [torch.full_like(t, 77) for t in results]


def examine(dense: Dense, budgeted: bool = False) -> dict[str, Any]:
    """Return figures of a network: the largest error in float64, that in float32 beside the network's own rounding, and
    the pixels whose largest channel is another one."""
    net, x = dense.build(), dense.image()
    with torch.no_grad():
        right = [t for t in tree_leaves(net(x)) if isinstance(t, Tensor)]
        small = copy.deepcopy(net).float()
        rounded = [t for t in tree_leaves(small(x.float())) if isinstance(t, Tensor)]

    found, tiled = like(right), like(rounded)
    infer(net, x, dense.sinks(found), tiles=(3, 2))
    infer(small, x.float(), dense.sinks(tiled), tiles=(3, 2))
    classes = torch.zeros_like(right[-1][:, 0], dtype=torch.int64)
    differing = int((found[-1].argmax(1) != right[-1].argmax(1)).sum()) if right[-1].dim() == 4 else 0
    row = {
        "network": dense.label,
        "results": len(right),
        "error": max(map(error, found, right)),
        "error in float32": max(map(error, tiled, right)),
        "plain PyTorch's in float32": max(map(error, rounded, right)),
        "pixels of another class": differing,
        "pixels": classes.numel(),
    }
    if budgeted:
        again = like(right)
        module, budget = under_budget(net, x, dense.sinks(again))
        row |= {"budget": budget, "peak": module.peak_bytes, "error under it": max(map(error, again, right))}
    return row


def under_budget(net: nn.Module, x: Tensor, sinks: Any) -> tuple[TiledModule, int]:
    """Run within two thirds of what the whole needs, or the smallest budget that works if that is more; returns the
    module that has run, and the budget."""
    with torch.no_grad():
        budget = make_plan(net, tuple(x.shape), budget="1TiB", dtype=x.dtype).peak_bytes * 2 // 3
    try:
        infer(module := TiledModule(net, budget=budget), x, sinks)
    except BudgetError as refused:
        budget = refused.smallest
        infer(module := TiledModule(net, budget=budget), x, sinks)
    return module, budget


@pytest.mark.slow
@pytest.mark.parametrize("label", SAMPLED)
def test_a_network_of_others_is_exact(label: str) -> None:
    row = examine(next(d for d in NETWORKS if d.label == label))
    assert is_right(row), row


@pytest.mark.full
def test_sixty_networks_of_others_are_exact(record_result: Callable[[str, dict[str, Any]], None]) -> None:
    rows = [examine(dense, budgeted=True) for dense in NETWORKS]
    wrong = [row for row in rows if not is_right(row)]
    record_result("infer_networks", {"networks": rows, "count": len(rows), "right": len(rows) - len(wrong)})
    assert not wrong
    assert len(rows) >= 60


@pytest.mark.full
@pytest.mark.skipif(not os.access(CLEAR, os.W_OK), reason="the kernel's high-water mark cannot be reset")
def test_the_processes_of_sixty_networks_take_little_more_than_their_budgets(
    record_result: Callable[[str, dict[str, Any]], None],
) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-m", "tests.lightning_plugin.infer_peaks"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    record_result("infer_peaks", {"networks": rows})
    assert len(rows) == len(NETWORKS)
    assert all(row["held"] <= row["budget"] and holds(row) for row in rows)


def is_right(row: dict[str, Any]) -> bool:
    within = row.get("peak", 0) <= row.get("budget", 0) and row.get("error under it", 0.0) < 1e-9
    rounding = row["error in float32"] < 8 * row["plain PyTorch's in float32"] + 1e-6
    return within and rounding and row["error"] < 1e-9 and row["pixels of another class"] == 0
