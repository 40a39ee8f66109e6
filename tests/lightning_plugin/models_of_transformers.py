"""Models of the library transformers, built from their configurations at tiny sizes: what becomes of each under tiles.

The library's own attention, written out (``eager``), rounds its softmax to float32 in many models, whatever the type of
the network. What comes of it is measured without tiles, against the same weights with PyTorch's attention (``sdpa``),
and nothing more than a few times that is excused.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_plugin.errors import EngineError
from tests.exactness import TOLERANCE, compare, errors
from tests.lightning_plugin.cases import GRIDS, noting, still
from tests.zoo import fill


@dataclass(frozen=True)
class Model:
    """A model of the library, an input that it takes, the output that is looked at, and its configuration."""

    name: str
    shape: tuple[int, ...]
    output: str
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def attention(self) -> str:
        return str(self.arguments.get("attn_implementation", ""))

    @property
    def label(self) -> str:
        return " ".join(filter(None, (self.name, self.attention)))

    def build(self, transformers: ModuleType, **changed: Any) -> nn.Module:
        config = getattr(transformers, f"{self.name}Config")(**{**self.arguments, **changed})
        return Output(getattr(transformers, f"{self.name}Model")(config), self.output)


class Output(nn.Module):
    """One output of a model that returns several by name."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self.model(x), self.name)  # type: ignore[no-any-return]


def plain_vit(name: str, *size: int, output: str = "last_hidden_state", patch: int = 16, **more: Any) -> list[Model]:
    """A Vision Transformer of two blocks, with PyTorch's attention and with the library's own."""
    width = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sides = {"image_size": size[0], "patch_size": patch}
    ways = ("sdpa", "eager")
    return [Model(name, (2, 3, *size), output, {**width, **sides, **more, "attn_implementation": way}) for way in ways]


def pyramid(name: str, side: int, output: str, **arguments: Any) -> Model:
    return Model(name, (2, 3, side, side), output, arguments)


NARROW = {"intermediate_size": 48}
STEPS: dict[str, Any] = {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2]}
HEADS: dict[str, Any] = {"depths": [1, 2, 1, 1], "num_heads": [1, 1, 2, 2]}
NECKS: dict[str, Any] = {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 32]}
WINDOWS: dict[str, Any] = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4, "patch_size": 2}

MODELS = (
    *plain_vit("ViT", 32, 32, **NARROW),
    *plain_vit("Dinov2", 28, 42, patch=14, mlp_ratio=2),
    *plain_vit("Dinov2WithRegisters", 28, 42, patch=14, mlp_ratio=2),
    *plain_vit("DINOv3ViT", 32, 48, num_register_tokens=2, pos_embed_rescale=None, **NARROW),
    *plain_vit("DeiT", 32, 32, **NARROW),
    *plain_vit("CLIPVision", 32, 32, output="pooler_output", **NARROW),
    *plain_vit("SiglipVision", 32, 32, output="pooler_output", **NARROW),
    *plain_vit("IJepa", 32, 32, **NARROW),
    *plain_vit("Beit", 32, 32, output="pooler_output", use_relative_position_bias=True, **NARROW),
    *plain_vit("Data2VecVision", 32, 32, **NARROW),
    pyramid("Swin", 32, "pooler_output", image_size=32, **WINDOWS),
    pyramid("Swinv2", 32, "pooler_output", image_size=32, **WINDOWS),
    pyramid("Hiera", 64, "pooler_output", image_size=[64, 64], embed_dim=16, **HEADS),
    pyramid("Pvt", 64, "last_hidden_state", image_size=64, **STEPS),
    pyramid("Segformer", 64, "last_hidden_state", **STEPS),
    pyramid("MobileViT", 64, "last_hidden_state", **NECKS),
    pyramid("ConvNextV2", 64, "pooler_output", hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1]),
    pyramid("ResNet", 64, "pooler_output", embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1]),
)  # fmt: skip
#: The quick ones, each with something of its own, which the sampled run tests.
SAMPLED = (
    "ViT eager",
    "Dinov2WithRegisters sdpa",
    "DINOv3ViT sdpa",
    "CLIPVision sdpa",
    "Beit sdpa",
    "SiglipVision sdpa",
)
#: How many times the rounding of the library's own attention is excused: tiles round once more, in other orders.
EXCUSED = 10


def examine(transformers: ModuleType, model: Model) -> dict[str, Any]:
    """As `architectures.examine`; ``rounding`` is what the library's own attention rounds off."""
    torch.manual_seed(0)
    net = still(fill(model.build(transformers).double())).train()
    engine = noting(*GRIDS[0])
    row: dict[str, Any] = {"name": model.label, "shape": list(model.shape)}
    try:
        found = errors(net, model.shape, engine=engine)
    except EngineError as error:
        return {**row, "result": "error", "message": str(error)}
    largest = max(found.values())
    if largest >= TOLERANCE and model.attention == "eager":
        row["rounding"] = rounding(transformers, model, net)
    barriers = sorted({b.split(" in ")[0].split(": ")[0] for b in engine.noted})
    wrong = not largest < max(TOLERANCE, EXCUSED * row.get("rounding", 0.0))
    return {
        **row,
        "result": "wrong" if wrong else "barrier" if barriers else "pass",
        "error": largest,
        "barriers": barriers,
    }


def rounding(transformers: ModuleType, model: Model, net: nn.Module) -> float:
    """The largest difference, without tiles, that the library's own attention makes to PyTorch's."""
    other = still(model.build(transformers, attn_implementation="sdpa").double()).train()
    other.load_state_dict(copy.deepcopy(net.state_dict()))
    torch.manual_seed(1)
    x = torch.randn(model.shape, dtype=torch.float64)
    outputs, inputs = [], []
    for each in (net, other):
        each.zero_grad()
        image = x.clone().requires_grad_()
        out = each(image)
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out))
        outputs.append(out)
        inputs.append(image.grad)
    return max(compare(other, net, outputs[:1], outputs[1:], (inputs[0], inputs[1])).values())
