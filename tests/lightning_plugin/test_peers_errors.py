"""What published streaming systems get silently wrong, each as a test: exact in float64 over three optimizer steps.

Every case trains with momentum on new images of other sizes, with batches, with an optimizer made before the module is
wrapped, and compares the gradient of every image too, across all seams between tiles.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_plugin import LazyImage, TiledModule
from lightning_plugin.capture.lazy import LazyTensor
from lightning_plugin.capture.session import Session
from lightning_plugin.graph import Capture, Image
from lightning_plugin.residency.boundary import Boundary
from tests.exactness import TOLERANCE, difference
from tests.zoo import ZOO, fill


class Head(nn.Module):
    """Global mean and a linear layer."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Linear(channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.mean(tuple(range(2, x.dim()))))


class Twice(nn.Module):
    """One convolution and one norm, each used at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(self.stem(x))))
        return self.norm(self.conv(F.max_pool2d(x, 2))).mean((2, 3))


class LayerScale(nn.Module):
    """ConvNeXt's: a parameter that multiplies each channel of a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 2, stride=2)
        self.branch = nn.Sequential(nn.Conv2d(4, 4, 7, padding=3, groups=4), nn.GELU())
        self.gamma = nn.Parameter(torch.rand(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return (x + self.gamma * self.branch(x)).mean((2, 3))


class Up(nn.Module):
    """Ends at another stride than it has inside, on the way back up."""

    def __init__(self, up: nn.Module) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 4, 3, stride=3, padding=1)
        self.up = up
        self.out = nn.Conv2d(4, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.up(F.relu(self.down(x)))))


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Sequential(nn.Conv2d(channels, 2, 1), nn.ReLU(), nn.Conv2d(2, channels, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.fc(F.adaptive_avg_pool2d(x, 1))


class FunctionalPool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.conv(x)), 3, 2, 1, ceil_mode=True)


def evaluated(net: nn.Module) -> nn.Module:
    """Statistics frozen, affine trained, as pathology's frozen BatchNorms are."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train = lambda mode=True, module=module: nn.Module.train(module, False)  # type: ignore[method-assign]
    return net.eval()


def stack(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


CASES: dict[str, Callable[[], nn.Module]] = {
    "batch with bias": lambda: stack(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), Head(4)),
    "sizes that the stride does not divide": lambda: stack(
        nn.Conv2d(3, 4, 5, stride=3, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(4, 4, 4, stride=2), Head(4)
    ),
    "trained affine of an eval-mode BatchNorm": lambda: evaluated(
        stack(
            nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), Head(4)
        )
    ),
    "BatchNorm that trains": lambda: stack(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(True),
        nn.Conv2d(4, 4, 3, 2),
        nn.BatchNorm2d(4),
        Head(4),
    ),
    "PReLU": lambda: stack(nn.Conv2d(3, 4, 3), nn.PReLU(4), nn.Conv2d(4, 4, 3), nn.PReLU(), Head(4)),
    "layer scale": LayerScale,
    "GroupNorm": lambda: stack(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3), Head(4)),
    "InstanceNorm": lambda: stack(
        nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.ReLU(), nn.Conv2d(4, 2, 3)
    ),
    "reflect padding": lambda: stack(
        nn.Conv2d(3, 4, 5, padding=2, padding_mode="reflect"),
        nn.ReLU(),
        nn.ReflectionPad2d((3, 1, 2, 0)),
        nn.Conv2d(4, 2, 3),
    ),
    "a module used twice": Twice,
    "bilinear upsampling": lambda: Up(nn.Upsample(scale_factor=2, mode="bilinear")),
    "transposed convolution": lambda: Up(nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1)),
    "dilation": lambda: stack(
        nn.Conv2d(3, 4, 3, dilation=4, padding=3), nn.ReLU(), nn.Conv2d(4, 4, 3, dilation=2), Head(4)
    ),
    "1 x 7 kernels": lambda: stack(
        nn.Conv2d(3, 4, (1, 7), padding=(0, 3)), nn.ReLU(), nn.Conv2d(4, 4, (7, 1)), Head(4)
    ),
    "squeeze and excite": lambda: stack(
        nn.Conv2d(3, 4, 3), SqueezeExcite(4), nn.Conv2d(4, 4, 3), nn.Hardswish(), Head(4)
    ),
    "F.max_pool2d": FunctionalPool,
    "one channel": lambda: stack(nn.Conv2d(3, 1, 3), nn.ReLU(), nn.Conv2d(1, 1, 3), nn.BatchNorm2d(1), Head(1)),
    "resnet18 that trains": ZOO["resnet18"].build,
    "shufflenet": ZOO["shufflenet_v2"].build,
    "convnext": ZOO["convnext_v2_tiny"].build,
}
SHAPES = ((2, 3, 47, 61), (3, 3, 59, 38), (2, 3, 43, 53))
GRIDS = ((3, 2), (2, 4))


def images(requires_grad: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_(requires_grad) for s in SHAPES]


def loss_of(out: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    return (out * torch.randn(out.shape, generator=generator, dtype=torch.float64)).sum()


def train(net: nn.Module, run: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    """Three steps; what each leaves: output, loss, all gradients, parameters and buffers."""
    seen = []
    for x in images():
        optimizer.zero_grad()
        out = run(x)
        loss = loss_of(out)
        loss.backward()
        step = {"output": out, "loss": loss, "image gradient": x.grad}
        step |= {f"gradient of {n}": p.grad for n, p in net.named_parameters()}
        optimizer.step()
        step |= {f"state of {n}": t for n, t in net.state_dict().items()}
        seen.append({k: v.detach().clone() for k, v in step.items() if v is not None})
    return seen


#: Cases that take longest, like networks of the zoo.
LONG = ("shufflenet", "resnet18 that trains")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name in LONG else []) for name in CASES]
)
def test_three_steps_are_exact(name: str) -> None:
    plain = fill(CASES[name]().double())
    net = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9) for m in (plain, net)]
    tiled = TiledModule(net, tiles=GRIDS[0], backward_tiles=GRIDS[1])
    expected = train(plain, plain, optimizers[0])
    actual = train(net, tiled, optimizers[1])
    for step, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.keys() == e.keys()
        floor = 1e-3 * max(t.abs().max().item() for k, t in e.items() if "gradient" in k)
        errors = {k: difference(a[k], e[k], floor if "gradient" in k else 0.0) for k in e}
        assert not {k: v for k, v in errors.items() if not v < TOLERANCE}, f"step {step}"
    tiles = {s.forward.tiles for s in tiled.plan.segments if not s.keep}
    assert max(tiles) > 1, "nothing was tiled"


def test_dropout_repeats_its_mask_in_recompute() -> None:
    """The gradient of x ↦ dropout(x).sum() is the mask itself: forward and recompute have to agree on it."""
    net = TiledModule(nn.Sequential(nn.Dropout(0.4), nn.Identity()), tiles=(3, 2), backward_tiles=(2, 5))
    for x in images():
        out = net(x)
        out.sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(out, x * x.grad, rtol=0, atol=1e-12)
        dropped = (x.grad == 0).double().mean().item()
        assert 0.35 < dropped < 0.45


def make() -> tuple[nn.Module, TiledModule]:
    net = fill(CASES["BatchNorm that trains"]().double())
    return net, TiledModule(net, tiles=GRIDS[0], backward_tiles=GRIDS[1])


def test_parameters_state_and_modes_are_the_users_own() -> None:
    net, tiled = make()
    before = dict(net.named_parameters())
    forwards = {n: type(m).forward for n, m in net.named_modules()}
    attributes = {n: set(vars(m)) for n, m in net.named_modules()}
    tiled(images()[0]).sum().backward()
    assert all(p is before[n] for n, p in net.named_parameters())
    assert [id(p) for p in tiled.parameters()] == [id(p) for p in net.parameters()]
    assert list(tiled.state_dict()) == list(net.state_dict())
    tiled.load_state_dict(copy.deepcopy(net).state_dict())
    assert {n: type(m).forward for n, m in net.named_modules()} == forwards
    assert {n: set(vars(m)) for n, m in net.named_modules()} == attributes
    assert not any("forward" in vars(m) for m in net.modules())
    tiled.eval()
    assert not any(m.training for m in net.modules())
    tiled.train()
    assert all(m.training for m in net.modules())


def test_nothing_of_torch_is_patched() -> None:
    names = ("conv2d", "relu", "max_pool2d", "batch_norm", "interpolate", "dropout", "linear")
    before = [getattr(F, n) for n in names] + [nn.Module.__call__, Tensor.backward, torch.autograd.grad]
    make()[1](images()[0]).sum().backward()
    assert [getattr(F, n) for n in names] + [nn.Module.__call__, Tensor.backward, torch.autograd.grad] == before


def test_parameter_hooks_fire_once_a_step() -> None:
    net, tiled = make()
    calls: dict[str, int] = {}
    after: dict[str, int] = {}
    for n, p in net.named_parameters():
        p.register_hook(lambda g, n=n: calls.update({n: calls.get(n, 0) + 1}))
        p.register_post_accumulate_grad_hook(lambda p, n=n: after.update({n: after.get(n, 0) + 1}))
    for step, x in enumerate(images(), 1):
        tiled(x).sum().backward()
        assert set(calls) == set(after) == {n for n, _ in net.named_parameters()}
        assert set(calls.values()) == set(after.values()) == {step}


def test_module_hooks_fire_once_a_forward() -> None:
    net, tiled = make()
    seen: list[str] = []
    for n, m in net.named_children():
        m.register_forward_pre_hook(lambda module, args, n=n: seen.append(f"before {n}"))
        m.register_forward_hook(lambda module, args, out, n=n: seen.append(f"after {n}"))
    tiled(images()[0]).sum().backward()
    assert seen == [f"{when} {n}" for n, _ in net.named_children() for when in ("before", "after")]


def test_frozen_parameters_get_no_gradient() -> None:
    net, tiled = make()
    frozen = {n for i, (n, p) in enumerate(net.named_parameters()) if i % 2 and p.requires_grad_(False) is p}
    (x,) = images(False)[:1]
    tiled(x).sum().backward()
    assert x.grad is None
    assert {n for n, p in net.named_parameters() if p.grad is None} == frozen


@pytest.fixture
def left() -> Callable[[], list[str]]:
    """The engine's objects that were made since the test began: the traceback of an earlier test may hold more.

    What was recorded stays with the module, and holds no data.
    """
    gc.collect()
    gc.freeze()  # and `get_objects` does not find them

    def alive() -> list[str]:
        for _ in range(3):  # a tensor that holds Python objects goes in one pass, what it held in the next
            gc.collect()
        kinds = (LazyTensor, Boundary, Session, Capture, Image)
        return sorted({type(o).__name__ for o in gc.get_objects() if issubclass(type(o), kinds)})

    return alive


def test_no_state_survives_a_step(left: Callable[[], list[str]]) -> None:
    _, tiled = make()
    for x in images():
        loss = tiled(x).sum()
        loss.backward()
        del loss
        assert left() == []


def test_no_state_survives_a_step_that_is_abandoned(left: Callable[[], list[str]]) -> None:
    """A result that is dropped before backward, and a recording that is never run, leave nothing either."""
    net, tiled = make()
    tiled(images()[0])
    net(LazyImage.from_tensor(images()[1]))
    loss = tiled(images()[2]).sum()
    assert "Boundary" in left(), "what backward will read is kept while there may be one"
    del loss
    assert left() == []


def test_a_recording_that_is_dropped_still_updates_running_statistics() -> None:
    plain = fill(CASES["BatchNorm that trains"]().double())
    net = copy.deepcopy(plain)
    plain(images()[0])
    TiledModule(net, tiles=GRIDS[0])(images()[0])
    for (n, a), (_, e) in zip(net.named_buffers(), plain.named_buffers(), strict=True):
        assert difference(a, e) < TOLERANCE, n


@pytest.mark.parametrize("how", [{"tiles": 2}, {"budget": "1GiB"}], ids=["tiled", "kept"])
def test_an_instance_norm_takes_a_cotangent_in_any_order(how: dict[str, Any]) -> None:
    """PyTorch's own (2.13) reads one in channels-last order wrongly, where the batch is one image."""
    norm = nn.InstanceNorm2d(2).double()
    x, w = (torch.randn(1, 2, 7, 5, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(2))
    gradients = []
    for module, cotangent in ((norm, w), (TiledModule(norm, **how), w.contiguous(memory_format=torch.channels_last))):
        leaf = x.clone().requires_grad_()
        (module(leaf) * cotangent).sum().backward()
        gradients.append(leaf.grad)
    assert difference(gradients[1], gradients[0]) < TOLERANCE
