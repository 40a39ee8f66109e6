"""Bringing a batch to the device without moving what is too large for it.

A user's batch is moved by the user's hooks, by the ``to`` of the user's own batch class, or by Lightning.
All of them end in ``Tensor.to``. So the hooks run as they are, and there a large dense tensor becomes a
lazy one instead of a copy.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_plugin.capture.lazy import LazyImage, LazyTensor
from lightning_plugin.private import parse_to
from lightning_plugin.settings import Settings
from lightning_plugin.strategy.images import is_image, lazy_image


class Moving(TorchFunctionMode):
    """While it is active, large dense images become lazy where they would be moved.

    ``least`` is the size in bytes from which on a dense image is tiled.
    """

    def __init__(self, device: torch.device, settings: Settings, least: int) -> None:
        super().__init__()
        self.device = device
        self.settings = settings
        self.least = least

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.to or func is Tensor.cuda:
            lazy = self.lazy(args[0])
            if lazy is not None:
                dtype = parse_to(*args[1:], **_known(kwargs))[1] if func is Tensor.to else None
                return lazy if dtype is None or dtype == lazy.dtype else lazy.to(dtype)
        return func(*args, **kwargs)

    def lazy(self, tensor: Any) -> Tensor | None:
        """The lazy form of a large dense image, None for anything else."""
        arrangement = is_image(tensor, self.least) if isinstance(tensor, Tensor) else None
        if arrangement is None:
            return None
        return lazy_image(tensor, arrangement, self.device, self.settings)

    def rest(self, batch: Any) -> Any:
        """Make lazy what the hooks left dense, and let every lazy tensor follow this strategy's settings."""

        def settle(tensor: Tensor) -> Tensor:
            if isinstance(tensor, LazyTensor):
                tensor._session.root().settings = self.settings
                return tensor
            lazy = self.lazy(tensor)
            return tensor if lazy is None else lazy

        return apply_to_collection(batch, Tensor, settle)


def renew(batch: Any, device: torch.device, settings: Settings) -> Any:
    """The user's own images, each with a recording of its own for this step.

    A dataset may give the same `LazyImage` again in every epoch; what was recorded from it must not pile up.
    """

    def fresh(image: LazyTensor) -> Tensor:
        if isinstance(image, LazyImage):
            return LazyImage(image.source, device=device, requires_grad=image.requires_grad, settings=settings)
        session = image._session.root()  # recorded from an image before the step, by a conversion of its type say
        session.captured.clear()
        session.key, session.random_calls = None, 0
        return image

    return apply_to_collection(batch, LazyTensor, fresh)


def describe(batch: Any, least: int) -> str:
    """The dense images of a batch, as far as memory goes; nothing where an image is lazy from the start."""
    found: list[str] = []

    def note(tensor: Tensor) -> Tensor:
        if isinstance(tensor, LazyTensor):
            found.append("")
        elif is_image(tensor, least):
            found.append(f"{tuple(tensor.shape)} {tensor.dtype}")
        return tensor

    apply_to_collection(batch, Tensor, note)
    return "; ".join(found) if all(found) else ""


def lazy_tensors(batch: Any) -> list[LazyTensor]:
    """The lazy tensors in a collection of any kind."""
    found: list[LazyTensor] = []

    def note(tensor: LazyTensor) -> LazyTensor:
        found.append(tensor)
        return tensor

    apply_to_collection(batch, LazyTensor, note)
    return found


def _known(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in kwargs.items() if k != "copy"}
