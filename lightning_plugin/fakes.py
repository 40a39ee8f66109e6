"""Tensors without data, for one thread at a time.

[Note: threads] A fake tensor belongs to a mode, and a mode remembers what it is in the middle of. So each thread has
modes of its own, and a recording stays with those of the thread that began it (`Session.mode`): two threads may record
at the same time, each its own network, and values of two threads' recordings may not meet in one call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from lightning_plugin.dispatch import Remembering
from lightning_plugin.private import FakeTensorMode, without_modes


class Modes(threading.local):
    """A thread's modes: ``recording`` propagates shapes and refuses tensors with data, ``planning`` runs rules, whose
    tables of positions are real tensors that meet the fake ones."""

    # Made when they are first asked for: a thread that records nothing has none.

    @cached_property
    def recording(self) -> FakeTensorMode:
        return Remembering(allow_non_fake_inputs=False)

    @cached_property
    def planning(self) -> FakeTensorMode:
        return Remembering(allow_non_fake_inputs=True)

    @cached_property
    def unbound(self) -> Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]:
        return lru_cache(maxsize=4096)(self._unbound)

    def _unbound(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        with torch.inference_mode(False), without_modes(), self.recording:
            return torch.empty(shape, dtype=dtype, device=device)


MODES = Modes()


def unbound(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A fake tensor that stands for no particular value; a ledger does not see it."""
    return MODES.unbound(shape, dtype, device)
