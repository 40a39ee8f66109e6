"""A recording is a value: other images and tensors are other bindings of the same nodes, in any number of threads."""

from __future__ import annotations

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from lightning_plugin import Grid, LazyImage, TensorSource
from lightning_plugin.capture import alias
from lightning_plugin.execute.frame import Frame, Step
from lightning_plugin.execute.run import run_plan
from lightning_plugin.graph import Bindings, Capture, Image, Node, Recording, Value
from lightning_plugin.program.findings import Library
from lightning_plugin.program.fixed import fixed_plan
from tests.exactness import TOLERANCE, difference

CPU = torch.device("cpu")


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.MaxPool2d(2),
        nn.GELU(),
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)).double().eval()


def image(seed: int) -> Tensor:
    return torch.randn(1, 3, 25, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def recorded(net: nn.Module) -> tuple[tuple[Node, ...], Value, Value, dict[str, Value], weakref.ref[Tensor]]:
    """Nodes of a network, the values of its image, result and parameters, and the image that it was recorded on."""
    x = image(0)
    out = net(LazyImage.from_tensor(x))
    recording = out._session.root().recording_of([out._value])
    captured = {id(c.tensor): v for v, c in recording.bindings.captures.items()}
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    names = {name: captured[id(t)] for name, t in tensors.items() if id(t) in captured}
    (source,) = recording.bindings.images
    return recording.nodes, source, out._value, names, weakref.ref(x)


def test_a_recording_runs_on_other_images_and_parameters_in_several_threads() -> None:
    nodes, source, result, names, first = recorded(network())
    gc.collect()
    assert first() is None, "the nodes hold the image of the step"
    plan, library = fixed_plan(nodes, Grid((2, 2)), Grid((2, 3))), Library()

    def step(net: nn.Module, x: Tensor) -> Tensor:
        tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
        captures = {v: Capture(tensors[name], None) for name, v in names.items()}
        bindings = Bindings({source: Image.of(TensorSource(x), CPU)}, captures)
        frame = Frame(bindings, {}, Step(library=library))
        run_plan(plan, Recording(nodes, bindings), frame)
        found = frame.vectors[result]
        found.square().sum().backward()
        return found.detach()

    nets = [network() for _ in range(4)]
    for i, net in enumerate(nets):
        for p in net.parameters():
            torch.nn.init.normal_(p, std=0.3 + 0.1 * i)
    plain = copy.deepcopy(nets)
    with ThreadPoolExecutor(4) as threads:
        for seeds in (range(1, 5), range(5, 9)):
            found = list(threads.map(step, nets, map(image, seeds)))
            for net, seed, out in zip(plain, seeds, found, strict=True):
                expected = net(image(seed))
                expected.square().sum().backward()
                assert difference(out, expected.detach()) < TOLERANCE
    for net, other in zip(nets, plain, strict=True):
        for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None
            assert difference(mine.grad, theirs.grad) < TOLERANCE


def test_what_is_remembered_of_calls_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list may have any number of tensors: patches of a bag, levels of a pyramid."""
    monkeypatch.setattr(alias, "MAX_KNOWN_CALLS", 8)
    monkeypatch.setattr(alias, "_differentiates", {})
    h = LazyImage.from_tensor(torch.randn(1, 3, 8, 8, requires_grad=True)) * 2
    for count in range(2, 20):
        assert torch.stack([h] * count).requires_grad
        assert 0 < len(alias._differentiates) <= 8
