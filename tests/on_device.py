"""Tests run on another device: `pytest --device cuda` makes there whatever a test, or a module it builds, makes.

What the engine itself makes is left where it makes it: a tensor that it makes in the wrong place has to be found.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from lightning_plugin import LazyImage

BOOKS = "judges by the books of a CPU's allocator; a CUDA device's rounds each tensor up and holds workspaces"
OWN = "names its device itself"
#: Tests of the engine that stay on a CPU, by a part of their names, and why.
ELSEWHERE = {
    "planner/": BOOKS,
    "test_the_budget_is_kept_with_identical_tiles": BOOKS,
    "test_a_budget_is_for_all_calls_of_a_step": BOOKS,
    "strategy/": OWN,
    "execute/": OWN,
    "test_store.py": OWN,
    "test_printing_shows_values_of_vectors": OWN,
    "test_an_image_can_be_pickled_copied_moved": OWN,
    "aminmax": "PyTorch has no derivative of it on CUDA",
    "(0.4, 1.04)": "an axis that keeps its size under a factor runs whole on CUDA",
}

TORCH = str(Path(torch.__file__).parent)
ENGINE = str(Path(__file__).resolve().parents[1] / "lightning_plugin")


class OnDevice(TorchFunctionMode):
    """Functions that make tensors make them on a device, unless the engine calls them or the caller names another."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.makers = _device_constructors()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in self.makers or kwargs.get("device") is not None or by_engine(sys._getframe(1)):
            return func(*args, **kwargs)
        generator = kwargs.get("generator")
        if generator is not None and generator.device.type != self.device.type:
            return func(*args, **kwargs).to(self.device)  # the same numbers as on a CPU
        return func(*args, **{**kwargs, "device": self.device})


def by_engine(frame: FrameType | None) -> bool:
    """Whether the nearest caller that is not PyTorch's own code is the engine."""
    while frame is not None and frame.f_code.co_filename.startswith(TORCH):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(ENGINE)


def enter(device: str) -> None:
    """From now on, tests are on a device, where float32 means float32."""
    made = LazyImage.__new__

    def make(cls: type[LazyImage], source: Any, *, device: Any = device, **options: Any) -> LazyImage:
        return made(cls, source, device=device, **options)

    LazyImage.__new__ = make  # type: ignore[method-assign]
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    OnDevice(torch.device(device)).__enter__()
