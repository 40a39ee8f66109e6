"""Facts about any network: its stages, the channels and stride of its map, strides of its parts.

An unknown network is asked with an image on the meta device, so that nothing is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

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
