"""Streamed tensors: their homes on the host or in files on the disk.

[Note: streamed] A plan puts each parameter on a tier. Below the device, the user's `Parameter` keeps its identity, and
its memory is pinned memory of the host or a mapped file. All code outside segments (an optimizer, a ``state_dict``, an
average of weights, a regulariser, a logged norm) reads and writes this one value, on the tier where it lies. Segments
compute with *copies* on the device, each fetched for a use and freed after it. Autograd saves a reference to the
parameter and its version in place of a copy: a parameter that was written to since is refused. Gradients and optimizer
states lie on the parameter's tier. A tensor stays on the tier that it was once moved to, unless a map is made of it
that lasts, such as a position embedding added to an image: no use of a segment would fetch its copy, so it comes back
to the device. On a CPU, tensors on the host are copied too, since the host's memory is not the budget's.

A network that is too large for the host is made without data (``with torch.device("meta")``). `build` allocates its
parameters on their tier, one module after the other, and fills them from a checkpoint or by the module itself: no more
than one module's parameters are held anywhere else.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from lightning_plugin.errors import EngineError
from lightning_plugin.memory import Heap
from lightning_plugin.private import WeakTensorKeyDictionary, move_storage, storage_key, version
from lightning_plugin.residency.disk import MappedFile, fills_its_memory, flat_bytes


class Homes:
    """Tiers and files of streamed tensors, across steps."""

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        self._tiers = WeakTensorKeyDictionary()
        #: The file of each mapped storage, by its key, while the storage is alive.
        self._files: dict[int, tuple[weakref.ref[torch.UntypedStorage], MappedFile]] = {}

    def __contains__(self, tensor: object) -> bool:
        return bool(self) and tensor in self._tiers

    def __iter__(self) -> Iterator[Tensor]:
        return iter(list(self._tiers))

    def __bool__(self) -> bool:
        return len(self._tiers) > 0

    def tier(self, tensor: Tensor) -> str | None:
        """Return the tier of a tensor; None if it is on the device."""
        found: str | None = self._tiers.get(tensor) if self else None
        return found

    def file(self, tensor: Tensor) -> MappedFile | None:
        """Return the file that a tensor is mapped from; None if it is not."""
        found = self._files.get(storage_key(tensor))
        return None if found is None else found[1]

    @torch.no_grad()
    def place(self, tensor: Tensor, tier: str, device: torch.device) -> None:
        """Put a tensor on a tier, and copy it there unless its memory is on that tier: the user may have replaced
        it."""
        if tensor not in self._tiers and tier == "disk" and tensor.requires_grad:
            tensor.register_post_accumulate_grad_hook(self.place_gradient)
        self._tiers[tensor] = tier
        if not self.is_at_home(tensor, tier, device):
            replace_memory(tensor, lambda values: self.copy_to_tier(values, tier, device))

    def is_at_home(self, tensor: Tensor, tier: str, device: torch.device) -> bool:
        if tier == "disk":
            return self.file(tensor) is not None
        return tensor.device.type == "cpu" and (device.type != "cuda" or tensor.is_pinned())

    @torch.no_grad()
    def take_back(self, tensor: Tensor, device: torch.device) -> None:
        """Move a streamed tensor, with its gradient, back to the device."""
        del self._tiers[tensor]
        replace_memory(tensor, lambda values: values.to(device, copy=True))

    def place_gradient(self, tensor: Tensor) -> None:
        """Move a gradient that autograd made itself (the sum of several uses) to its parameter's tier."""
        gradient, tier = tensor.grad, self.tier(tensor)
        if gradient is not None and tier == "disk" and self.file(gradient) is None:
            tensor.grad = self.copy_to_tier(gradient, tier, gradient.device)

    def copy_to_tier(self, values: Tensor, tier: str, device: torch.device) -> Tensor:
        """Return a copy of some values on a tier."""
        room = self.allocate(values, tier, device)
        file = self.file(room)
        if file is None or not fills_its_memory(values):
            return room.copy_(values)
        file.write_from(values.cpu())
        return room

    def allocate(self, like: Tensor, tier: str, device: torch.device) -> Tensor:
        """Allocate a tensor like another on a tier below ``device``."""
        if tier == "host":
            pinned = device.type == "cuda"
            return torch.empty_strided(*dense_layout(like), dtype=like.dtype, device="cpu", pin_memory=pinned)
        file = MappedFile(max(1, like.nbytes), self.folder)
        room = file.tensor_like(torch.empty_strided(*dense_layout(like), dtype=like.dtype, device="meta"))
        storage, key = room.untyped_storage(), storage_key(room)
        self._files[key] = weakref.ref(storage, partial(self._forget_file, key)), file
        return room

    def _forget_file(self, key: int, _: object = None) -> None:
        self._files.pop(key, None)

    def read(self, tensor: Tensor, room: Tensor) -> None:
        """Copy a tensor to memory on the device, in any thread."""
        file = self.file(tensor)
        if room.device.type == "cpu" and file is not None:
            file.read_into(room)
        elif room.device.type == "cpu":
            # By numpy: the transfer thread must not use PyTorch's thread pool.
            flat_bytes(room).numpy()[:] = flat_bytes(tensor).numpy()
        elif file is None:
            room.copy_(tensor.detach(), non_blocking=True)
        else:
            staged = torch.empty_strided(
                *dense_layout(tensor), dtype=tensor.dtype, pin_memory=room.device.type == "cuda"
            )
            file.read_into(staged)
            room.copy_(staged, non_blocking=True)

    def copy_gradient(self, tensor: Tensor, gradient: Tensor) -> Tensor:
        """Return a copy of a gradient on its parameter's tier."""
        return self.copy_to_tier(gradient, self.tier(tensor) or "host", gradient.device)

    def release_pages(self) -> None:
        """Release the pages of all mapped files from the process's memory."""
        for _, file in list(self._files.values()):
            file.release_pages()

    def release_pages_of(self, tensors: Iterable[Tensor]) -> None:
        """Release the pages of these tensors' files."""
        for file in map(self.file, tensors):
            if file is not None:
                file.release_pages()


@torch.no_grad()
def move_to_device(tensor: Tensor, device: torch.device) -> None:
    """Move a tensor in place to a device if it was made on the CPU."""
    if tensor.device.type == "cpu" != device.type and not tensor.is_meta:
        replace_memory(tensor, lambda values: values.to(device))


def replace_memory(tensor: Tensor, copy: Callable[[Tensor], Tensor]) -> None:
    """Replace the memory of a tensor, and of its gradient, by that of a copy."""
    gradient = tensor.grad
    values, moved = copy(tensor.detach()), None if gradient is None else copy(gradient)
    tensor.grad = None  # a gradient has to be on its tensor's device
    move_storage(tensor, values)
    tensor.grad = moved


def dense_layout(like: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides of a dense tensor like another: with its strides if it is dense, else contiguous."""
    if fills_its_memory(like):
        return tuple(like.shape), like.stride()
    return tuple(like.shape), torch.empty(like.shape, device="meta").stride()


Initialize = Callable[[nn.Module], None]


@torch.no_grad()
def build(
    module: nn.Module,
    homes: Homes,
    tier: str,
    weights: Mapping[str, Tensor] | None = None,
    initialize: Initialize | None = None,
) -> None:
    """Allocate all parameters of a module that have no data on a tier, and such buffers in ordinary memory.

    Values come from ``weights``, by name, else from ``initialize``, which is called with each module once its own
    tensors are allocated, else from the module's ``reset_parameters``. Tied parameters stay tied.
    """
    made: dict[int, Tensor] = {}
    filled: set[int] = set()  # tied parameters are filled once
    heap = Heap(0)
    for path, part in module.named_modules():
        here = list(tensors_without_data(part, path))
        if not here:
            continue
        for tensors, name, key in here:
            old = tensors[name]
            assert old is not None
            if id(old) not in made:
                made[id(old)] = allocate_like(old, homes, tier)
            tensors[name] = new = made[id(old)]
            if weights is not None:
                if key not in weights:
                    raise EngineError(
                        f"the weights have nothing for {key!r}, which has no data yet. Give weights with all names of "
                        "the module's state_dict, or none and a way to initialize each module."
                    )
                if id(new) not in filled:
                    new.copy_(weights[key])
            filled.add(id(new))
        if weights is None:
            before = [(key, tensors[name], version(tensors[name])) for tensors, name, key in here]  # type: ignore[arg-type]
            (initialize or reset_parameters)(part)
            for key, tensor, was in before:
                if version(tensor) == was:  # type: ignore[arg-type]
                    raise EngineError(
                        f"{key!r} had no data, and nothing has filled it: {type(part).__name__} does not. "
                        "Give weights, or initialize=<a function that fills the tensors of one module>."
                    )
        placed = [tensor for tensors, name, _ in here if (tensor := tensors[name]) is not None]
        homes.release_pages_of(placed)
        heap.freed += sum(tensor.nbytes for tensor in placed)
        if heap.is_due:  # values that are made for one parameter at a time leave as many bytes of holes
            heap.trim(0)


def tensors_without_data(part: nn.Module, path: str) -> Iterator[tuple[dict[str, Tensor | None], str, str]]:
    """Iterate over the tensors without data that a module has itself: (their dictionary, name, full name)."""
    prefix = f"{path}." if path else ""
    for tensors in (part._parameters, part._buffers):
        for name, tensor in list(tensors.items()):
            if tensor is not None and tensor.is_meta:
                yield tensors, name, prefix + name  # type: ignore[misc]


def allocate_like(old: Tensor, homes: Homes, tier: str) -> Tensor:
    """Allocate a tensor without data: a parameter on a tier, a buffer in ordinary memory."""
    if not isinstance(old, nn.Parameter):
        return torch.empty_like(old, device="cpu")
    cpu = torch.device("cpu")
    new = nn.Parameter(homes.allocate(old, tier, cpu), requires_grad=old.requires_grad)
    homes.place(new, tier, cpu)
    return new


def reset_parameters(part: nn.Module) -> None:
    """Initialize the tensors that a module has itself."""
    reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
    if reset is None:
        raise EngineError(
            f"{type(part).__name__} has parameters without data and no reset_parameters(). Give weights, or "
            "initialize=<a function that fills the tensors of one module>."
        )
    reset()
