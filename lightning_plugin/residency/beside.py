"""Work of a CUDA device beside its kernels: transfers have a stream of their own; see [Note: mapped] in `host`.

On any other device there is no such stream, and work is done where it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which a device's transfers run."""
    return torch.cuda.Stream(device)


def launched(device: torch.device) -> torch.cuda.Event | None:
    """All that was launched on a device until now: a transfer has to wait for it before it may touch its tile."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def beside(device: torch.device, work: Callable[[], object], ready: torch.cuda.Event | None) -> torch.cuda.Event | None:
    """Do work beside a device's kernels, after those that are to be ready; the event is when it is done."""
    if ready is None:
        work()
        return None
    side = side_stream(device)
    with torch.cuda.stream(side):
        side.wait_event(ready)
        work()
        return side.record_event()


def after(device: torch.device, done: torch.cuda.Event | None) -> None:
    """Have a device's next kernels wait for work that goes on beside them."""
    if done is not None:
        torch.cuda.current_stream(device).wait_event(done)
