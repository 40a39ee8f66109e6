"""Batches, whose large images become lazy.

A tensor is an image if it is large and has spatial dimensions. PyTorch does not say which dimension holds channels, so
it is read off the shape; a wrong guess costs tiling (an operator then runs whole), never exactness.

A user's batch is moved by the user's hooks, by the ``to`` of the user's own batch class, or by Lightning. All of them
end in ``Tensor.to``. So the hooks run as they are, and there a large dense tensor becomes a lazy one instead of a copy.
A batch is gone through twice besides: before the hooks (`begin`) and after them (`Moving.finish`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_plugin.capture.lazy import LazyImage, LazyTensor
from lightning_plugin.engine import Engine
from lightning_plugin.private import parse_to
from lightning_plugin.source import COLOURS, TensorSource


@dataclass(frozen=True)
class Arrangement:
    """Dimensions of a tensor: those before ``channel`` are batch, all others are space.

    ``channel`` is None where there are no channels.
    """

    channel: int | None

    @staticmethod
    def of(shape: Sequence[int], dtype: torch.dtype) -> Arrangement | None:
        """The arrangement of a tensor, or None where it has no space to tile."""
        rank = len(shape)
        if rank < 3 or 0 in shape:
            return None
        if rank == 3:
            if not dtype.is_floating_point:
                return Arrangement(None)  # (N, H, W): the class of every pixel
            return Arrangement(1) if shape[2] > shape[1] else None  # else (N, positions, features)
        if shape[1] in COLOURS:
            return Arrangement(1)
        if rank == 4 and shape[3] in COLOURS:
            return Arrangement(3)
        if rank == 5 and shape[2] in COLOURS and shape[4] not in COLOURS:
            return Arrangement(2)  # (N, images, C, H, W): a bag of images
        return Arrangement(1)


def lazy_image(tensor: Tensor, arrangement: Arrangement, device: torch.device, engine: Engine) -> Any:
    """A dense tensor, left where it is, as a lazy tensor of the same shape whose tiles go to ``device``."""
    channel = arrangement.channel
    if channel is None:
        return LazyImage.from_tensor(tensor.unsqueeze(1), device=device, engine=engine).squeeze(1)
    if channel == tensor.dim() - 1:
        image = LazyImage.from_tensor(tensor.movedim(-1, 1), device=device, engine=engine)
        return image.movedim(1, -1)
    if channel == 2:
        return LazyImage(TensorSource(tensor, 2), device=device, requires_grad=tensor.requires_grad, engine=engine)
    return LazyImage.from_tensor(tensor, device=device, engine=engine)


def is_image(tensor: Tensor, least: int) -> Arrangement | None:
    """The arrangement of an ordinary tensor of at least ``least`` bytes, if it is an image."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return None
    if tensor.is_complex() or tensor.is_quantized or tensor.numel() * tensor.element_size() < least:
        return None
    return Arrangement.of(tensor.shape, tensor.dtype)


def begin(batch: Any, device: torch.device, engine: Engine, least: int) -> tuple[Any, str]:
    """A batch whose lazy images have a recording of their own for this step, and a description of its dense images, as
    far as memory goes: nothing where an image is lazy from the start.

    A dataset may give the same `LazyImage` again in every epoch; what was recorded from it must not pile up.
    """
    found: list[str] = []

    def renew(tensor: Tensor) -> Tensor:
        if isinstance(tensor, LazyImage):
            found.append("")
            return LazyImage(tensor.source, device=device, requires_grad=tensor.requires_grad, engine=engine)
        if isinstance(tensor, LazyTensor):
            found.append("")
            session = tensor._session.root()  # recorded from an image before the step, by a conversion of its type say
            session.captured.clear()
            session.key, session.random_calls = None, 0
        elif is_image(tensor, least):
            found.append(f"{tuple(tensor.shape)} {tensor.dtype}")
        return tensor

    batch = apply_to_collection(batch, Tensor, renew)
    return batch, "; ".join(found) if all(found) else ""


class Moving(TorchFunctionMode):
    """While it is active, large dense images become lazy where they would be moved.

    ``least`` is the size in bytes from which on a dense image is tiled, ``images`` are the lazy tensors of the batch.
    """

    def __init__(self, device: torch.device, engine: Engine, least: int) -> None:
        super().__init__()
        self.device = device
        self.engine = engine
        self.least = least
        self.images: list[LazyTensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.to or func is Tensor.cuda:
            lazy = self.lazy(args[0])
            if lazy is not None:
                known = {k: v for k, v in kwargs.items() if k != "copy"}
                dtype = parse_to(*args[1:], **known)[1] if func is Tensor.to else None
                return lazy if dtype is None or dtype == lazy.dtype else lazy.to(dtype)
        return func(*args, **kwargs)

    def lazy(self, tensor: Any) -> Tensor | None:
        """The lazy form of a large dense image, None for anything else."""
        arrangement = is_image(tensor, self.least) if isinstance(tensor, Tensor) else None
        if arrangement is None:
            return None
        lazy = lazy_image(tensor, arrangement, self.device, self.engine)
        self.images.append(lazy)
        return lazy

    def finish(self, batch: Any) -> Any:
        """The batch, with what the hooks left dense lazy too, and every lazy tensor run by this strategy's engine."""

        def settle(tensor: Tensor) -> Tensor:
            if isinstance(tensor, LazyTensor):
                tensor._session.root().engine = self.engine
                self.images.append(tensor)
                return tensor
            lazy = self.lazy(tensor)
            return tensor if lazy is None else lazy

        return apply_to_collection(batch, Tensor, settle)
