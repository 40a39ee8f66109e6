"""Planning without Python's collector of cycles.

[Note: collector] It looks at all that a process holds, the modules of PyTorch too, whenever some hundreds of objects
were made, and a search makes millions that no cycle holds: that takes a sixth of its time. And what a rehearsal lets go
is counted where it goes; what waited for a collector would be counted wherever that came by, in one process here, in
another there.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """A block in which no cycles are looked for, unless another thread has them looked for."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
