"""Transfer of batches to the device: large images become lazy instead of being copied.

A tensor is an image if it is large and has spatial dimensions. PyTorch does not say which dimension holds channels, so
it is guessed from the shape; a wrong guess costs tiling (an operator then runs whole), never exactness.

A batch is moved by the user's hooks, by the ``to`` of the user's own batch class, or by Lightning. All of them call
``Tensor.to``. The hooks therefore run unchanged, and `LazyTransfer` intercepts that call. The batch is traversed twice
besides: before the hooks (`prepare_batch`) and after them (`LazyTransfer.finish`).
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
from lightning_plugin.ops import has_gradients
from lightning_plugin.private import parse_to
from lightning_plugin.source import COLOURS, TensorSource


@dataclass(frozen=True)
class Arrangement:
    """Meaning of a tensor's dimensions: batch before ``channel``, space elsewhere.

    ``channel`` is None for a tensor without channels.
    """

    channel: int | None

    @staticmethod
    def of(shape: Sequence[int], dtype: torch.dtype) -> Arrangement | None:
        """Guess the arrangement from the shape; None for a tensor without space to tile."""
        rank = len(shape)
        if rank < 3 or 0 in shape:
            return None
        if rank == 3:
            if not has_gradients(dtype):
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
    """Wrap a dense tensor in a lazy one of the same shape; its tiles are copied to ``device`` as they are needed."""
    channel = arrangement.channel
    if channel is None:
        return LazyImage.from_tensor(tensor.unsqueeze(1), device=device, engine=engine).squeeze(1)
    if channel == tensor.dim() - 1:
        image = LazyImage.from_tensor(tensor.movedim(-1, 1), device=device, engine=engine)
        return image.movedim(1, -1)
    if channel == 2:
        return LazyImage(TensorSource(tensor, 2), device=device, requires_grad=tensor.requires_grad, engine=engine)
    return LazyImage.from_tensor(tensor, device=device, engine=engine)


def arrangement_of_image(tensor: Tensor, min_bytes: int) -> Arrangement | None:
    """Return the arrangement of an ordinary tensor of ``min_bytes`` or more; None if it is no image."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return None
    if tensor.is_complex() or tensor.is_quantized or tensor.numel() * tensor.element_size() < min_bytes:
        return None
    return Arrangement.of(tensor.shape, tensor.dtype)


def prepare_batch(batch: Any, device: torch.device, engine: Engine, min_bytes: int) -> tuple[Any, str]:
    """Give the lazy images of a batch a new recording, and describe its dense images.

    A dataset may return the same `LazyImage` in every epoch; recordings of earlier steps must not pile up.

    Returns:
        The batch.
        The shapes and types of its dense images, which decide the memory of the step; empty if any image is lazy.
    """
    descriptions: list[str] = []

    def renew(tensor: Tensor) -> Tensor:
        if isinstance(tensor, LazyImage):
            descriptions.append("")
            return LazyImage(tensor.source, device=device, requires_grad=tensor.requires_grad, engine=engine)
        if isinstance(tensor, LazyTensor):
            descriptions.append("")
            session = tensor._session.root()  # recorded from an image before the step, by a conversion of its type say
            session.captured_values.clear()
            session.begin_random_numbers()
        elif arrangement_of_image(tensor, min_bytes):
            descriptions.append(f"{tuple(tensor.shape)} {tensor.dtype}")
        return tensor

    batch = apply_to_collection(batch, Tensor, renew)
    return batch, "; ".join(descriptions) if all(descriptions) else ""


class LazyTransfer(TorchFunctionMode):
    """Mode in which ``Tensor.to`` and ``Tensor.cuda`` of a large dense image return a lazy tensor.

    Attributes:
        min_bytes: Size from which on a dense image is tiled.
        images: Lazy tensors of the batch.
    """

    def __init__(self, device: torch.device, engine: Engine, min_bytes: int) -> None:
        super().__init__()
        self.device = device
        self.engine = engine
        self.min_bytes = min_bytes
        self.images: list[LazyTensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.to or func is Tensor.cuda:
            lazy = self.make_lazy(args[0])
            if lazy is not None:
                known = {k: v for k, v in kwargs.items() if k != "copy"}
                dtype = parse_to(*args[1:], **known)[1] if func is Tensor.to else None
                return lazy if dtype is None or dtype == lazy.dtype else lazy.to(dtype)
        return func(*args, **kwargs)

    def make_lazy(self, tensor: Any) -> Tensor | None:
        """Return the lazy form of a large dense image; None for anything else."""
        arrangement = arrangement_of_image(tensor, self.min_bytes) if isinstance(tensor, Tensor) else None
        if arrangement is None:
            return None
        lazy = lazy_image(tensor, arrangement, self.device, self.engine)
        self.images.append(lazy)
        return lazy

    def finish(self, batch: Any) -> Any:
        """Make images lazy that the hooks did not move, and have all lazy tensors run by this strategy's engine."""

        def adopt(tensor: Tensor) -> Tensor:
            if isinstance(tensor, LazyTensor):
                tensor._session.root().engine = self.engine
                self.images.append(tensor)
                return tensor
            lazy = self.make_lazy(tensor)
            return tensor if lazy is None else lazy

        return apply_to_collection(batch, Tensor, adopt)
