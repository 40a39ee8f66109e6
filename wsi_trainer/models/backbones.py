"""Backbones: from a slide to a map of features. They know nothing of tiles.

Two small networks and a U-Net of this package need PyTorch alone. Published architectures are timm's (`timm:NAME`) and
those of segmentation-models-pytorch (`smp:ARCHITECTURE:ENCODER`), from `pip install 'wsi-trainer[networks]'`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from wsi_trainer.errors import UserError

INSTALL = "pip install 'wsi-trainer[networks]'"


NormKind = Literal["none", "weight", "batch", "group", "channel"]
"""What keeps activations in range: nothing, standardised weights, or BatchNorm, GroupNorm, LayerNorm over
channels.
"""


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of each position, as ConvNeXt uses.

    It looks at one position only, so it costs a tiled network nothing: no statistic of the whole slide is
    needed.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class StandardisedConv2d(nn.Conv2d):
    """A convolution whose filters are brought to zero mean and a learned length before use.

    A filter of zero mean answers to texture and not to how dark the stain is. It costs nothing in pixels,
    and, unlike BatchNorm, needs no statistic of the slide.
    """

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0, groups: int = 1
    ) -> None:
        super().__init__(inputs, outputs, kernel, stride=stride, padding=padding, groups=groups)
        self.gain = nn.Parameter(torch.full((outputs, 1, 1, 1), 3**0.5))  # keeps the variance behind a ReLU

    def forward(self, x: Tensor) -> Tensor:
        mean = self.weight.mean(dim=(1, 2, 3), keepdim=True)
        centred = self.weight - mean
        length = centred.square().sum(dim=(1, 2, 3), keepdim=True)
        weight = centred * torch.rsqrt(length + 1e-6) * self.gain
        return functional.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


def make_norm(kind: NormKind, channels: int) -> nn.Module:
    """The normalisation layer that `kind` names, for a map of `channels` channels."""
    if kind in ("none", "weight"):
        return nn.Identity()
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "group":
        return nn.GroupNorm(next(groups for groups in (8, 4, 2, 1) if channels % groups == 0), channels)
    if kind == "channel":
        return ChannelNorm(channels, eps=1e-6)
    raise ValueError(f"norm is {kind!r}; it must be one of none, weight, batch, group, channel")


def make_conv(
    inputs: int, outputs: int, norm: NormKind, kernel: int = 3, stride: int = 1, groups: int = 1
) -> nn.Conv2d:
    """A padded convolution for the norm that follows it, initialised for a ReLU."""
    if norm == "weight":
        conv: nn.Conv2d = StandardisedConv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, groups=groups)
    else:
        bias = norm in ("none", "channel")
        conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=bias)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
    return conv


def conv3x3(inputs: int, outputs: int, norm: NormKind, stride: int = 1) -> nn.Conv2d:
    """A padded 3×3 convolution for the norm that follows it, initialised for a ReLU."""
    return make_conv(inputs, outputs, norm, 3, stride)


def conv_norm_relu(inputs: int, outputs: int, norm: NormKind, stride: int = 1) -> nn.Sequential:
    """A padded 3×3 convolution, its normalisation and a ReLU."""
    conv = conv3x3(inputs, outputs, norm, stride)
    return nn.Sequential(conv, make_norm(norm, outputs), nn.ReLU(inplace=True))


class Backbone(nn.Module):
    """A map from (N, 3, H, W) to (N, out_channels, H / stride, W / stride), in stages.

    Attributes:
        out_channels: Channels of the map.
        stride: Pixels of the slide for one position of the map.
        layers: The layers in order.
        lengths: How many of the layers each stage has, the stem with the first.
    """

    out_channels: int
    stride: int
    layers: nn.Sequential
    lengths: Sequence[int]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def stages(self) -> list[nn.Module]:
        """The stages in order."""
        layers, start = list(self.layers), 0
        found: list[nn.Module] = []
        for length in self.lengths:
            found.append(nn.ModuleList(layers[start : start + length]))
            start += length
        return found


def check_widths(widths: Sequence[int]) -> list[int]:
    """The widths as a list; an error where they make no network."""
    if not widths or any(width < 1 for width in widths):
        raise ValueError(f"widths is {list(widths)}; give at least one positive number of channels")
    return list(widths)


def check_counts(**counts: int) -> None:
    """Refuse a number of layers, or a stride, that makes no network."""
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} is {count}; it must be 1 or more")


class VGG(Backbone):
    """Stages of 3×3 convolutions, each stage ended by a 2×2 maximum."""

    def __init__(
        self,
        widths: Sequence[int] = (16, 32, 64, 128),
        convs: int = 2,
        stem_stride: int = 1,
        norm: NormKind = "weight",
    ) -> None:
        """Build the network.

        Args:
            widths: Channels of each stage.
            convs: Convolutions in each stage.
            stem_stride: Stride of the first convolution; 2 makes everything after it four times cheaper.
            norm: Normalisation after each convolution.
        """
        super().__init__()
        widths = check_widths(widths)
        check_counts(convs=convs, stem_stride=stem_stride)
        layers: list[nn.Module] = []
        inputs = 3
        for stage, width in enumerate(widths):
            for index in range(convs):
                stride = stem_stride if stage == index == 0 else 1
                layers.append(conv_norm_relu(inputs, width, norm, stride))
                inputs = width
            layers.append(nn.MaxPool2d(2))
        self.layers = nn.Sequential(*layers)
        self.lengths = [convs + 1] * len(widths)
        self.out_channels = widths[-1]
        self.stride = stem_stride * 2 ** len(widths)


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut, as in ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: NormKind) -> None:
        super().__init__()
        self.first = conv_norm_relu(inputs, outputs, norm, stride)
        self.second = nn.Sequential(conv3x3(outputs, outputs, norm), make_norm(norm, outputs))
        last = self.second[0]
        # Without a norm the sum grows from block to block: start each block as its shortcut.
        if isinstance(last, StandardisedConv2d):
            nn.init.zeros_(last.gain)
        elif norm == "none" and isinstance(last, nn.Conv2d):
            nn.init.zeros_(last.weight)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), make_norm(norm, outputs)
            )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.second(self.first(x)) + self.shortcut(x))


class ResNet(Backbone):
    """A residual network with a strided 3×3 stem; `widths=(64, 128, 256, 512), blocks=2` has ResNet-18's
    stages.
    """

    def __init__(
        self,
        widths: Sequence[int] = (16, 32, 64, 128),
        blocks: int = 1,
        stem_stride: int = 2,
        norm: NormKind = "batch",
    ) -> None:
        """Build the network.

        Args:
            widths: Channels of each stage; each stage after the first halves the map.
            blocks: Residual blocks in each stage.
            stem_stride: Stride of the first convolution.
            norm: Normalisation after each convolution. With one slide a step, "batch" normalises by that
                slide.
        """
        super().__init__()
        widths = check_widths(widths)
        check_counts(blocks=blocks, stem_stride=stem_stride)
        layers: list[nn.Module] = [conv_norm_relu(3, widths[0], norm, stem_stride)]
        inputs = widths[0]
        for stage, width in enumerate(widths):
            for index in range(blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                layers.append(ResidualBlock(inputs, width, stride, norm))
                inputs = width
        self.layers = nn.Sequential(*layers)
        self.lengths = [blocks + 1] + [blocks] * (len(widths) - 1)
        self.out_channels = widths[-1]
        self.stride = stem_stride * 2 ** (len(widths) - 1)


class _ContractingPath(Backbone):
    """Two 3×3 convolutions in each stage, a 2×2 maximum between stages."""

    def __init__(self, widths: Sequence[int], norm: NormKind) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for stage, width in enumerate(widths):
            if stage:
                layers.append(nn.MaxPool2d(2))
            layers += [conv_norm_relu(inputs, width, norm), conv_norm_relu(width, width, norm)]
            inputs = width
        self.layers = nn.Sequential(*layers)
        self.lengths = [2] + [3] * (len(widths) - 1)

    def maps(self, x: Tensor) -> list[Tensor]:
        """The last map of each stage, from fine to coarse."""
        found = []
        for layer in self.layers:
            if isinstance(layer, nn.MaxPool2d):
                found.append(x)
            x = layer(x)
        return [*found, x]


class UNet(Backbone):
    """A small U-Net: a class for each pixel (SegmentationTask).

    The slide is continued at its end, by repeating the last row and column, until the coarsest stride divides its
    sides, so that the maps lie exactly on each other.
    """

    stride = 1

    def __init__(self, widths: Sequence[int] = (16, 32, 64, 128), norm: NormKind = "weight") -> None:
        """Build the network.

        Args:
            widths: Channels of each stage; the last is the bottleneck.
            norm: Normalisation after each convolution. A statistic over the slide (batch) is one more pass over all
                tiles each time, so weight is much faster.
        """
        super().__init__()
        widths = check_widths(widths)
        self.encoder = _ContractingPath(widths, norm)
        self.decoder = nn.ModuleList(
            nn.Sequential(conv_norm_relu(below + width, width, norm), conv_norm_relu(width, width, norm))
            for width, below in reversed(list(pairwise(widths)))
        )
        self.out_channels = widths[0]

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        *skips, x = self.encoder.maps(padded(x, 2 ** len(self.decoder)))
        for block in self.decoder:
            x = block(torch.cat([skips.pop(), functional.interpolate(x, scale_factor=2.0)], dim=1))
        return x[:, :, :height, :width]

    def stages(self) -> list[nn.Module]:
        """The stages in order: down, then up."""
        return [*self.encoder.stages(), *self.decoder]


def padded(x: Tensor, stride: int) -> Tensor:
    """The slide, continued at its end by its last row and column until the stride divides its sides."""
    return functional.pad(x, (0, -x.shape[3] % stride, 0, -x.shape[2] % stride), mode="replicate")


def fitted(x: Tensor, like: Tensor) -> Tensor:
    """The map in the height and width of another: what is missing at the end repeats the last, what is over goes."""
    height, width = like.shape[2:]
    x = x[:, :, :height, :width]
    missing = (0, width - x.shape[3], 0, height - x.shape[2])
    return functional.pad(x, missing, mode="replicate") if any(missing) else x


class TimmBackbone(nn.Module):
    """A network of timm without its pooling and classifier; in a config also `timm:NAME`.

    Its weights are random: a file of weights is given as `model.pretrained`, so that a run needs no network.
    """

    def __init__(self, name: str) -> None:
        """Build the network.

        Args:
            name: The model's name in timm, such as resnet18.
        """
        super().__init__()
        self.name = name
        self.network = timm_network(name, global_pool="")
        try:
            self.out_channels, self.stride = describe(self.network)
        except TypeError as error:
            raise UserError(
                f"timm:{name} returns no map of features, as convolutional networks do; choose another model"
            ) from error

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def stages(self) -> list[nn.Module]:
        """The direct parts of the network that have parameters."""
        return stages_of(self.network)


class SegmentationBackbone(nn.Module):
    """A decoder of segmentation-models-pytorch over an encoder, without its head; in a config `smp:unet:resnet34`.

    Weights are random: a file of weights, of the whole or of the encoder alone, is given as `model.pretrained`.
    """

    def __init__(self, architecture: str, encoder: str = "resnet18") -> None:
        """Build the network.

        Args:
            architecture: The name of the decoder, such as unet, fpn, deeplabv3plus or segformer.
            encoder: The name of the encoder; `tu-NAME` names a network of timm.
        """
        super().__init__()
        smp = import_smp()
        try:
            network = smp.create_model(architecture, encoder, encoder_weights=None)
        except (KeyError, ValueError, RuntimeError) as error:
            raise UserError(
                f"segmentation-models-pytorch makes no {architecture} over {encoder} ({error}); give "
                "smp:ARCHITECTURE:ENCODER, such as smp:unet:resnet34 or smp:fpn:tu-convnext_atto"
            ) from error
        self.encoder, self.decoder = network.encoder, network.decoder
        self.coarsest = int(network.encoder.output_stride)
        self.out_channels, self.stride = describe(nn.Sequential(self.encoder, self.decoder))

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        found: Tensor = self.decoder(self.encoder(padded(x, self.coarsest)))
        return found[:, :, : -(-height // self.stride), : -(-width // self.stride)]

    def stages(self) -> list[nn.Module]:
        """The direct parts of the encoder, then of the decoder, that have parameters."""
        return [*stages_of(self.encoder), *stages_of(self.decoder)]


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


class NoSlide(nn.Module):
    """No slide at all: a model of `model.covariates` alone, for which none is opened. Its map is one 0.

    Attributes:
        prepared: Says that no colours are normalised.
    """

    prepared = True
    stride = 1
    out_channels = 1

    def forward(self, nothing: Tensor) -> Tensor:
        return nothing

    def stages(self) -> list[nn.Module]:
        """None: nothing is trained here."""
        return []


def make_backbone(named: nn.Module | str | None) -> nn.Module:
    """The module itself, or one by name: `timm:NAME`, `smp:ARCHITECTURE:ENCODER`, an import path; else a small VGG."""
    if named is None:
        return VGG()
    if isinstance(named, nn.Module):
        return named
    kind, _, rest = named.partition(":")
    if kind == "timm":
        return TimmBackbone(rest)
    if kind == "smp":
        return SegmentationBackbone(*rest.split(":", 1))
    module_name, _, name = named.rpartition(".")
    try:
        factory = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"model.backbone: nothing can be imported as {named!r} ({error}); give timm:NAME, "
            "smp:ARCHITECTURE:ENCODER, or the import path of a class such as wsi_trainer.models.ResNet"
        ) from error
    made = factory() if callable(factory) else factory
    if not isinstance(made, nn.Module):
        raise UserError(f"model.backbone: {named} makes a {type(made).__name__}, not a torch module")
    return made


def timm_network(name: str, num_classes: int | None = 0, **arguments: Any) -> nn.Module:
    """A network of timm by its name, with random weights; without its classifier, or by None with its own."""
    timm = import_timm()
    if name not in timm.list_models() and not timm.is_model(name):
        near = get_close_matches(name, timm.list_models(), n=3)
        raise UserError(f"timm has no model {name!r}" + (f"; near are {', '.join(near)}" if near else ""))
    network: nn.Module = timm.create_model(name, pretrained=False, num_classes=num_classes, **arguments)
    return network


def import_timm() -> Any:
    """timm, or an error that says how to get it."""
    return _imported("timm")


def import_smp() -> Any:
    """segmentation-models-pytorch, or an error that says how to get it."""
    return _imported("segmentation_models_pytorch")


def _imported(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: {INSTALL}") from error
    except RuntimeError as error:  # torchvision, which both import, was built for another torch
        raise UserError(
            f"{package} cannot be imported: {error}; torchvision has to be built for the torch that is installed: "
            "pip install torchvision from the index that torch came from"
        ) from error


# Facts about any network: its stages, the channels and stride of its map, strides of its parts. An unknown network is
# asked with an image on the meta device, so that nothing is computed.

SIDE = 256
"""Pixels along a side of the image by which an unknown network is asked."""


def stages_of(backbone: nn.Module) -> list[nn.Module]:
    """The stages of any network: its own `stages()`, or else its direct parts that have parameters, in order."""
    own = getattr(backbone, "stages", None)
    if callable(own) and not isinstance(own, nn.Module):
        return list(own())
    return [part for part in backbone.children() if any(True for _ in part.parameters())]


def blocks_as_stages(network: nn.Module) -> list[nn.Module]:
    """The stages of a network that is mostly one row of equal blocks, as ViTs are: what comes before, each of them, the
    rest.

    Other networks have the stages that `stages_of` finds.
    """
    rows = [part for part in network.modules() if isinstance(part, nn.Sequential | nn.ModuleList) and _alike(part)]
    row = max(rows, key=_size, default=None)
    if row is None or 2 * _size(row) < _size(network):
        return stages_of(network)
    inside = {id(part) for part in row.modules()}
    order = list(network.modules())
    place = next(index for index, part in enumerate(order) if part is row)
    leaves = [
        (index < place, part)
        for index, part in enumerate(order)
        if id(part) not in inside and any(True for _ in part.parameters(recurse=False)) and part is not network
    ]
    before, after = ([part for early, part in leaves if early is side] for side in (True, False))
    ends = [[nn.ModuleList(parts)] if parts else [] for parts in (before, after)]
    return [*ends[0], *row, *ends[1]]


def _alike(row: nn.Module) -> bool:
    return len({type(part) for part in row.children()}) == 1 and sum(1 for _ in row.children()) > 1


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def describe(backbone: nn.Module) -> tuple[int, int]:
    """Channels and stride of the map that a network returns: its attributes, or else what it does to a small image."""
    channels, stride = getattr(backbone, "out_channels", None), getattr(backbone, "stride", None)
    if isinstance(channels, int) and isinstance(stride, int):
        return channels, stride
    shape = _shape_of_map(backbone)
    return (
        channels if isinstance(channels, int) else shape[1],
        stride if isinstance(stride, int) else round(SIDE / shape[2]),
    )


def strides_inside(backbone: nn.Module, parts: Mapping[str, nn.Module]) -> dict[str, int]:
    """Pixels for one position of the map that each of these parts of a network is given."""
    found: dict[str, int] = {}

    def listen(name: str) -> Any:
        def hear(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            found[name] = round(SIDE / args[0].shape[2])

        return hear

    handles = [part.register_forward_pre_hook(listen(name)) for name, part in parts.items()]
    try:
        answer(backbone)
    finally:
        for handle in handles:
            handle.remove()
    if silent := sorted(set(parts) - set(found)):
        raise TypeError(f"the backbone {type(backbone).__name__} does not use its part {silent[0]}")
    return found


def answer(backbone: nn.Module, images: int = 1, side: int = SIDE) -> Any:
    """Result of a network for images of so many pixels, on the meta device: nothing is computed."""
    state = {key: value.to("meta") for key, value in (*backbone.named_parameters(), *backbone.named_buffers())}
    training = {part: part.training for part in backbone.modules()}
    dtype = next((p.dtype for p in backbone.parameters()), torch.get_default_dtype())
    try:
        with torch.no_grad():
            backbone.eval()
            return functional_call(backbone, state, (torch.empty(images, 3, side, side, device="meta", dtype=dtype),))
    finally:
        for part, mode in training.items():
            part.training = mode


def _shape_of_map(backbone: nn.Module) -> torch.Size:
    """The shape of the map that a network returns for an image of SIDE pixels."""
    name = type(backbone).__name__
    advice = (
        "set it to the number of channels of the map that it returns, and the attribute stride to the pixels for "
        "one position"
    )
    try:
        out = answer(backbone)
    except Exception as error:  # the network's own code: whatever it raises, the attributes are the way out
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TypeError(
            f"the backbone {name} has no integer attribute out_channels, and asking it with an image failed "
            f"({reason}); {advice}"
        ) from error
    shape = out.shape if isinstance(out, Tensor) else None
    if shape is None or len(shape) != 4 or not shape[2]:
        returned = type(out).__name__ if shape is None else f"a tensor of shape {tuple(shape)}"
        raise TypeError(
            f"the backbone {name} has no integer attribute out_channels, and returns {returned} instead of a map "
            f"(N, channels, height, width); take off its own pooling and classifier, or {advice}"
        )
    return shape
