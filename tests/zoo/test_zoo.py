"""The zoo itself: every network trains in plain PyTorch at odd sizes; published ones have their counts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.sampling import sampled

from . import STRUCTURED, ZOO, ZooEntry, fill

ENTRIES = [*ZOO.values(), *STRUCTURED.values()]

each_entry = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)


def tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        yield from output.values()
    else:
        assert isinstance(output, tuple)
        yield from output


def image(shape: tuple[int, ...], seed: int = 1) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def built(entry: ZooEntry) -> nn.Module:
    return fill(entry.build().double(), seed=0).train()


def loss_of(output: object) -> Tensor:
    """Not a plain sum: its gradient before a BatchNorm or a softmax would be zero."""
    total = torch.zeros((), dtype=torch.float64)
    for seed, tensor in enumerate(tensors(output)):
        total = total + (tensor * image(tuple(tensor.shape), seed)).sum()
    return total


@each_entry
def test_trains_in_float64(entry: ZooEntry) -> None:
    module = built(entry)
    torch.manual_seed(0)
    x = image(entry.shape).requires_grad_()
    output = module(x)
    for tensor in tensors(output):
        assert tensor.dtype == torch.float64
        assert tensor.isfinite().all()
        assert tensor.shape[0] == entry.shape[0]
        assert (tensor.dim() == len(entry.shape)) == entry.dense
    loss_of(output).backward()
    assert x.grad is not None and x.grad.isfinite().all() and x.grad.count_nonzero() > 0
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, f"{name} got no gradient"
        assert parameter.grad.isfinite().all(), f"{name}'s gradient is not finite"
        # A bias before a BatchNorm has a true gradient of zero; a branch may be dropped for every sample.
        if parameter.dim() > 1 and not entry.stochastic:
            assert parameter.grad.count_nonzero() > 0, f"{name}'s gradient is zero"


@pytest.mark.parametrize(("entry", "size"), sampled(ENTRIES, ["other_shape", "min_shape"], every=2))
def test_takes_other_sizes(entry: ZooEntry, size: str) -> None:
    shape: tuple[int, ...] = getattr(entry, size)
    output = built(entry)(image(shape))
    for tensor in tensors(output):
        assert tensor.isfinite().all()
        assert tensor.shape[0] == shape[0]
        assert min(tensor.shape) > 0
    loss_of(output).backward()


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.min_size > 1], ids=lambda entry: entry.name)
@pytest.mark.filterwarnings("ignore:std")
def test_min_size_is_the_smallest(entry: ZooEntry) -> None:
    shape = tuple(side - 1 if axis > 1 else side for axis, side in enumerate(entry.min_shape))
    try:
        output = built(entry)(image(shape))
    except (RuntimeError, ValueError):
        return
    assert any(tensor.numel() == 0 or not tensor.isfinite().all() for tensor in tensors(output))


@each_entry
def test_a_side_of_its_shape_is_odd(entry: ZooEntry) -> None:
    for shape in (entry.shape, entry.other_shape):
        assert any(side % 2 for side in shape[2:])
        assert min(shape[2:]) >= entry.min_size
    assert entry.shape != entry.other_shape


@each_entry
def test_stochastic_is_told(entry: ZooEntry) -> None:
    """Two runs from different seeds differ exactly where the entry says so."""
    module, x = built(entry), image(entry.shape)
    outputs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        outputs.append([tensor.detach() for tensor in tensors(module(x))])
    same = all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    assert same != entry.stochastic


@each_entry
def test_input_channels_are_free_and_full_version_builds_without_memory(entry: ZooEntry) -> None:
    assert entry.full is not None
    with torch.device("meta"):
        full = entry.full()
    assert all(parameter.is_meta for parameter in full.parameters())
    tiny = sum(parameter.numel() for parameter in entry.build().parameters())
    assert tiny < sum(parameter.numel() for parameter in full.parameters())
    narrow = entry.build(in_channels=2).double()  # type: ignore[call-arg]  # every build takes it
    shape = (entry.shape[0], 2, *entry.shape[2:])
    assert all(tensor.isfinite().all() for tensor in tensors(narrow(image(shape))))


PUBLISHED = {
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "vgg16_bn": 138_365_992,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet50_d": 25_576_264,
    "convnext_tiny": 28_589_128,
    "convnext_v2_tiny": 28_635_496,
    "squeezenet": 1_235_496,
    "shufflenet_v2": 2_278_604,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_full_size_has_the_published_parameter_count(name: str) -> None:
    entry = {**ZOO, **STRUCTURED}[name]
    assert entry.full is not None
    with torch.device("meta"):
        full = entry.full()
    assert sum(parameter.numel() for parameter in full.parameters()) == PUBLISHED[name]


def test_fill_is_deterministic_and_leaves_no_zero_scale() -> None:
    first, second = (fill(ZOO["convnext_v2_tiny"].build(), seed=3) for _ in range(2))
    other = fill(ZOO["convnext_v2_tiny"].build(), seed=4)
    for (name, a), b, c in zip(first.named_parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert not torch.equal(a, c), name
        assert a.detach().count_nonzero() == a.numel(), name
