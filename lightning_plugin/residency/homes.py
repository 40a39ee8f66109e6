"""Streamed tensors: their homes on the host or in files on the disk.

[Note: streamed] A parameter lives on the tier that a plan puts it on. Below the device it *is* what lies there: the
user's `Parameter` keeps its identity, and its memory is pinned memory of the host, or that of a mapped file. Whoever
reads or writes it outside a segment (an optimizer, a ``state_dict``, an average of weights, a regulariser, a norm that
is logged) reads and writes the one value that there is, on the device where it lies. Only segments compute with
*copies*, which are fetched for a use and let go after it. Autograd keeps a copy by the name of what it is a copy of,
with the version that was used: a tensor that was written to since is refused, as everywhere. Gradients come to where
their parameter lives, and so does what an optimizer keeps for it. What lives below once stays there. On a CPU, copies
are made of what lives on the host all the same: its memory is not the budget's.

A network that is too large for the host is made without data (``with torch.device("meta")``). `build` gives its
parameters memory where they are to live, one module after the other, and their values from a checkpoint or from the
module itself: never more than one is held anywhere else.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from lightning_plugin.errors import EngineError
from lightning_plugin.private import WeakTensorKeyDictionary, move_storage, storage_key, version
from lightning_plugin.residency.disk import MappedFile, fills_its_memory, flat_bytes


class Homes:
    """The homes of tensors, from step to step."""

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        self._tiers = WeakTensorKeyDictionary()
        #: The file of each tensor's memory that is one, as long as somebody holds that memory.
        self._files: dict[int, tuple[weakref.ref[torch.UntypedStorage], MappedFile]] = {}

    def __contains__(self, tensor: object) -> bool:
        return tensor in self._tiers

    def __iter__(self) -> Iterator[Tensor]:
        return iter(list(self._tiers))

    def __bool__(self) -> bool:
        return len(self._tiers) > 0

    def tier(self, tensor: Tensor) -> str | None:
        """The tier that a tensor lives on, where that is not the device."""
        found: str | None = self._tiers.get(tensor)
        return found

    def file(self, tensor: Tensor) -> MappedFile | None:
        """The file that a tensor's memory is."""
        found = self._files.get(storage_key(tensor))
        return None if found is None else found[1]

    @torch.no_grad()
    def settle(self, tensor: Tensor, tier: str, device: torch.device) -> None:
        """Have a tensor live below a device. What it lies in now is its home, or is copied there: somebody may have
        given it other memory since."""
        if tensor not in self._tiers and tier == "disk" and tensor.requires_grad:
            tensor.register_post_accumulate_grad_hook(self.settle_gradient)
        self._tiers[tensor] = tier
        if not self.at_home(tensor, tier, device):
            put(tensor, lambda values: self.moved(values, tier, device))

    def at_home(self, tensor: Tensor, tier: str, device: torch.device) -> bool:
        if tier == "disk":
            return self.file(tensor) is not None
        return tensor.device.type == "cpu" and (device.type != "cuda" or tensor.is_pinned())

    def settle_gradient(self, tensor: Tensor) -> None:
        """Have a gradient that autograd made itself, a sum of several uses', live where its parameter does."""
        gradient, tier = tensor.grad, self.tier(tensor)
        if gradient is not None and tier == "disk" and self.file(gradient) is None:
            tensor.grad = self.moved(gradient, tier, gradient.device)

    def moved(self, values: Tensor, tier: str, device: torch.device) -> Tensor:
        """Values in memory of a tier."""
        room = self.room(values, tier, device)
        file = self.file(room)
        if file is None or not fills_its_memory(values):
            return room.copy_(values)
        file.write_from(values.cpu())
        return room

    def room(self, like: Tensor, tier: str, device: torch.device) -> Tensor:
        """Memory of a tier for a tensor like another, below a device."""
        if tier == "host":
            pinned = device.type == "cuda"
            return torch.empty_strided(*dense(like), dtype=like.dtype, device="cpu", pin_memory=pinned)
        file = MappedFile(max(1, like.nbytes), self.folder)
        room = file.tensor_like(torch.empty_strided(*dense(like), dtype=like.dtype, device="meta"))
        storage, key = room.untyped_storage(), storage_key(room)
        self._files[key] = weakref.ref(storage, partial(self._closed, key)), file
        return room

    def _closed(self, key: int, _: object = None) -> None:
        self._files.pop(key, None)

    def read(self, tensor: Tensor, room: Tensor) -> None:
        """Copy a tensor into room on the device, in any thread."""
        file = self.file(tensor)
        if room.device.type == "cpu" and file is not None:
            file.read_into(room)
        elif room.device.type == "cpu":
            # By numpy: a thread beside the one that computes must not ask PyTorch's threads for help.
            flat_bytes(room).numpy()[:] = flat_bytes(tensor).numpy()
        elif file is None:
            room.copy_(tensor.detach(), non_blocking=True)
        else:
            staged = torch.empty_strided(*dense(tensor), dtype=tensor.dtype, pin_memory=room.device.type == "cuda")
            file.read_into(staged)
            room.copy_(staged, non_blocking=True)

    def lower(self, tensor: Tensor, gradient: Tensor) -> Tensor:
        """A gradient where its parameter lives."""
        return self.moved(gradient, self.tier(tensor) or "host", gradient.device)

    def rest(self) -> None:
        """Let the pages of all files go that were read or written through their mappings."""
        for _, file in list(self._files.values()):
            file.rest()

    def rest_of(self, tensors: Iterable[Tensor]) -> None:
        """Let the pages of these tensors' files go."""
        for file in map(self.file, tensors):
            if file is not None:
                file.rest()


@torch.no_grad()
def move(tensor: Tensor, device: torch.device) -> None:
    """Have a tensor live on a device, where it was made on the CPU to be placed by a plan."""
    if tensor.device.type == "cpu" != device.type and not tensor.is_meta:
        put(tensor, lambda values: values.to(device))


def put(tensor: Tensor, there: Callable[[Tensor], Tensor]) -> None:
    """Give a tensor, and the gradient that it has, memory elsewhere."""
    gradient = tensor.grad
    values, moved = there(tensor.detach()), None if gradient is None else there(gradient)
    tensor.grad = None  # a gradient has to lie where its tensor does
    move_storage(tensor, values)
    tensor.grad = moved


def dense(like: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape and the strides of a tensor that fills its memory, in the order of another's dimensions."""
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
    """Give all parameters of a module that have no data a home on a tier, and all such buffers memory.

    Values come from ``weights``, by name, else from ``initialize``, which is called with each module whose own tensors
    are there now, else from the module's own ``reset_parameters``. What is tied stays tied.
    """
    made: dict[int, Tensor] = {}
    filled: set[int] = set()  # what is tied is filled once
    for path, part in module.named_modules():
        here = list(own(part, path))
        if not here:
            continue
        for tensors, name, key in here:
            old = tensors[name]
            assert old is not None
            if id(old) not in made:
                made[id(old)] = on_tier(old, homes, tier)
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
            (initialize or reset)(part)
            for key, tensor, was in before:
                if version(tensor) == was:  # type: ignore[arg-type]
                    raise EngineError(
                        f"{key!r} had no data, and nothing has filled it: {type(part).__name__} does not. "
                        "Give weights, or initialize=<a function that fills the tensors of one module>."
                    )
        homes.rest()


def own(part: nn.Module, path: str) -> Iterator[tuple[dict[str, Tensor | None], str, str]]:
    """The tensors without data that a module has itself: where they are kept, and their full names."""
    prefix = f"{path}." if path else ""
    for tensors in (part._parameters, part._buffers):
        for name, tensor in list(tensors.items()):
            if tensor is not None and tensor.is_meta:
                yield tensors, name, prefix + name  # type: ignore[misc]


def on_tier(old: Tensor, homes: Homes, tier: str) -> Tensor:
    """A tensor like one without data: a parameter with a home, a buffer in ordinary memory."""
    if not isinstance(old, nn.Parameter):
        return torch.empty_like(old, device="cpu")
    cpu = torch.device("cpu")
    new = nn.Parameter(homes.room(old, tier, cpu), requires_grad=old.requires_grad)
    homes.settle(new, tier, cpu)
    return new


def reset(part: nn.Module) -> None:
    """Have a module give its own tensors the values that it starts with."""
    ways = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
    if ways is None:
        raise EngineError(
            f"{type(part).__name__} has parameters without data and no reset_parameters(). Give weights, or "
            "initialize=<a function that fills the tensors of one module>."
        )
    ways()
