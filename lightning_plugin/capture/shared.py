"""Results that share memory in plain PyTorch share it here.

Maps are computed one by one, so that a map and a view of it would be two tensors, and what the user writes into one
would be missing in the other. So results that overlap in memory, by the sizes, strides and offsets of their fake
tensors, become views of one *holder*: the smallest dense tensor of the recording that has them all, which is one of the
results in most cases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from lightning_plugin.capture.session import Session, Stale, binding_of
from lightning_plugin.errors import RecordingError
from lightning_plugin.graph import Value
from lightning_plugin.layout import is_dense
from lightning_plugin.private import neg_view, storage_key

#: Steps of NumPy's search for an element of two tensors, after which they are taken to overlap.
MAX_WORK = 1 << 16


class InMemory:
    """The places of a fake tensor's elements, as an array that is never read."""

    def __init__(self, fake: Tensor) -> None:
        size = fake.element_size()
        self.__array_interface__ = {
            "shape": tuple(fake.shape),
            "strides": tuple(size * s for s in fake.stride()),
            "typestr": f"|V{size}",
            "data": ((1 << 40) + size * fake.storage_offset(), False),
            "version": 3,
        }


def overlap(a: Tensor, b: Tensor) -> bool:
    """True if two fake tensors of one storage have an element in common."""
    try:
        return bool(np.shares_memory(np.asarray(InMemory(a)), np.asarray(InMemory(b)), max_work=MAX_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def span(fake: Tensor) -> tuple[int, int]:
    """Return the first byte of a fake tensor in its storage, and the end of its last element."""
    size, first = fake.element_size(), fake.storage_offset()
    last = first + sum((n - 1) * s for n, s in zip(fake.shape, fake.stride(), strict=True))
    return int(size * first), int(size * (last + 1))


def holders_of(session: Session, results: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return the holder of each result that overlaps another one, or an image, in memory, by the result's place.

    Args:
        session: The session.
        results: Fake tensors of the results.
    """
    by_storage: dict[int, list[int]] = {}
    for i, fake in enumerate(results):
        by_storage.setdefault(storage_key(fake), []).append(i)
    found: dict[int, Tensor] = {}
    for key, places in by_storage.items():
        known = session.fakes_by_storage.get(key, ())
        if not any(map(is_map, known)):  # vectors are computed by PyTorch's own operators, and share memory as they do
            continue
        images = [f for f in known if image_tensor(session, f) is not None]
        pairs = meeting_pairs([*images, *(results[i] for i in places)])
        meeting = {id(f) for pair in pairs if overlap(*pair) for f in pair}
        together = [i for i in places if id(results[i]) in meeting]
        if together:
            members = [results[i] for i in together]
            holder = holder_of(members, [*images, *members, *known])
            found |= dict.fromkeys(together, holder)
    return found


def meeting_pairs(fakes: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the pairs of fake tensors whose spans meet; of thousands of patches of an image, hardly any do."""
    ordered = sorted(fakes, key=span)
    for i, fake in enumerate(ordered):
        end = span(fake)[1]
        yield from ((fake, other) for other in takewhile(lambda f: span(f)[0] < end, ordered[i + 1 :]))  # noqa: B023


def holder_of(members: Sequence[Tensor], known: Sequence[Tensor]) -> Tensor:
    """Return the first of the smallest dense tensors that have all members, among known ones of the storage."""
    lo, hi = min(span(f)[0] for f in members), max(span(f)[1] for f in members)
    able = [f for f in known if can_hold(f, members) and span(f)[0] <= lo and hi <= span(f)[1]]
    if not able:
        raise RecordingError(
            f"results of shapes {', '.join(str(tuple(f.shape)) for f in members)} share memory, through views of "
            "unknown kind, so that a write into one would not reach the other: clone() all but one of them"
        )
    return min(able, key=Tensor.numel)


def is_map(fake: Tensor) -> bool:
    value = binding_of(fake)
    return isinstance(value, Stale) or (isinstance(value, Value) and value.is_map)


def image_tensor(session: Session, fake: Tensor) -> Tensor | None:
    """Return the user's tensor of an image; None if it is elsewhere, has other strides, or ``fake`` is no image."""
    image = session.bindings.images.get(binding_of(fake))  # type: ignore[arg-type]
    found = None if image is None else image.on_device
    return found if found is not None and found.stride() == fake.stride() else None


def can_hold(holder: Tensor, members: Sequence[Tensor]) -> bool:
    """True if `view_in` can make all members."""
    if not is_dense(holder) or holder.is_conj() or holder.is_neg() or binding_of(holder) is None:
        return False
    return all(f.dtype in (holder.dtype, holder.dtype.to_real()) for f in members)


def view_in(held: Tensor, holder: Tensor, fake: Tensor, requires_grad: bool) -> Tensor:
    """Return a result as a view of a holder's tensor.

    Args:
        held: The tensor of the holder.
        holder: The fake tensor of the holder.
        fake: The fake tensor of the result.
        requires_grad: The result requires grad.
    """
    if fake is holder:
        return held
    if not requires_grad:
        held = held.detach()
    start = holder.storage_offset()
    if held.is_complex() and not fake.is_complex():
        held, start = torch.view_as_real(held), 2 * start
    found = held.as_strided(fake.shape, fake.stride(), held.storage_offset() + fake.storage_offset() - start)
    found = found.conj() if fake.is_conj() else found
    return neg_view(found) if fake.is_neg() else found
