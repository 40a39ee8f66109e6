"""A step that was seen is compared and not recorded, whatever changes between two steps and within them."""

from __future__ import annotations

import copy
import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.host import NETWORKS
from lightning_plugin import LazyImage, TiledModule
from lightning_plugin.capture import record, transcript
from lightning_plugin.errors import EngineError
from tests.exactness import TOLERANCE, difference

OPTIONS: dict[str, dict[str, Any]] = {
    "tiles": {"tiles": (2, 3)},
    "one tile": {"tiles": (1, 1)},
    "budget": {"budget": "600KiB", "calls": 3},
}


class Changing(nn.Module):
    """Operators of all kinds, and what a user may change between two steps, or within one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.third = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 1)
        self.instance = nn.InstanceNorm2d(6, affine=True, track_running_stats=True)
        self.drop, self.head = nn.Dropout(0.0), nn.Linear(6, 4)
        self.flags: dict[str, Any] = {}
        self.scale, self.steps = 1.0, 0
        self.index = torch.tensor([3, 0, 5, 1])
        self.register_buffer("weight", torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        self.steps += 1
        flags = self.flags
        y = F.gelu(self.norm(self.first(x)))
        if flags.get("written"):
            view = y[:, 1:3]
            view.mul_(1.5)
            y[..., ::2] += 0.25
        if flags.get("printed"):
            str(y.mean())
        if flags.get("autocast"):
            with torch.autocast("cpu", torch.bfloat16, enabled=False):
                y = self.second(y)
        elif flags.get("checkpointed"):
            y = checkpoint(self.second, y, use_reentrant=False)
        else:
            y = self.second(y)
        if flags.get("unseen"):
            with torch.no_grad():
                y = y + self.third(y).mean()
        if flags.get("twice"):
            y = self.norm(y)
        if flags.get("instance"):
            y = self.instance(y)
        y = y * self.scale + (self.steps % 3 if flags.get("counted") else 0)
        if flags.get("branches") and y.square().mean() > 0.5:
            y = y + 0.5
        if flags.get("picked"):
            y = y[:, self.index].index_select(3, torch.arange(self.steps % 4, 12)) + y[:, self.index, :, 3:4]
            y = torch.cat([y, y[:, :2]], 1)
        if flags.get("dropped"):
            y = F.feature_alpha_dropout(F.dropout2d(y, 0.3, self.training), 0.2, self.training)
        if flags.get("fails"):
            raise ZeroDivisionError
        if flags.get("refused"):
            y.data_ptr()
        z = self.drop(y.mean((2, 3)))
        if flags.get("masked"):
            z = torch.where(self.weight.new_tensor([1, 0, 1, 0, 1, 1]) > self.scale / 9, z, -z)
        return self.head(z) * self.weight


def image(seed: int, *size: int) -> Tensor:
    return torch.randn(size or (2, 3, 18, 22), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_same(tiled: nn.Module, plain: nn.Module) -> None:
    """Compare parameters, gradients (None where plain PyTorch has None) and buffers."""
    largest = max((float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None), default=0.0)
    floor = max(1e-3 * largest, 1e-4)  # before a normalisation, gradients are zero but for rounding
    for (name, p), q in zip(plain.named_parameters(), tiled.parameters(), strict=True):
        assert difference(q.detach(), p.detach(), 1e-3) < TOLERANCE, name
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and q.grad is not None:
            assert difference(q.grad, p.grad, floor) < TOLERANCE, name
    for (name, b), c in zip(plain.named_buffers(), tiled.named_buffers(), strict=True):
        assert difference(c[1], b, 1e-3) < TOLERANCE, name


# What changes between two steps ---------------------------------------------------------------------------------------

FLAGS = (
    "written", "printed", "autocast", "checkpointed", "unseen", "twice", "instance", "counted", "branches", "picked",
    "masked", "dropped",
)  # fmt: skip


def flag(net: Changing, rng: random.Random) -> None:
    name = rng.choice(FLAGS)
    net.flags[name] = not net.flags.get(name)


def number(net: Changing, rng: random.Random) -> None:
    net.scale = rng.choice([1.0, 1, True, 0.0, -0.0, 2, 2.5])


def momentum(net: Changing, rng: random.Random) -> None:
    net.norm.momentum = rng.choice([0.1, 0.4, None])


def epsilon(net: Changing, rng: random.Random) -> None:
    net.norm.eps = rng.choice([1e-5, 1e-2])


def hook(net: Changing, rng: random.Random) -> None:
    factor = rng.choice([1.5, 2.0])
    net.second.register_forward_hook(lambda module, args, out: out * factor)


def freeze(net: Changing, rng: random.Random) -> None:
    p = rng.choice([net.first.weight, net.second.bias, net.norm.weight])
    p.requires_grad_(not p.requires_grad)


def replace_buffer(net: Changing, rng: random.Random) -> None:
    net.weight = net.weight * 1.5


def restride_buffer(net: Changing, rng: random.Random) -> None:
    net.weight = net.weight.repeat_interleave(2)[::2]


def share(net: Changing, rng: random.Random) -> None:
    net.third.bias = net.second.bias = rng.choice([net.norm.bias, nn.Parameter(net.norm.bias.detach() * 2)])


def other_weight(net: Changing, rng: random.Random) -> None:
    net.second.weight = nn.Parameter(net.second.weight.detach() * 0.5)


def modes(net: Changing, rng: random.Random) -> None:
    net.norm.train(not net.norm.training)


def whole_mode(net: Changing, rng: random.Random) -> None:
    net.train(not net.training)


def load(net: Changing, rng: random.Random) -> None:
    net.load_state_dict({k: v * 0.9 if v.is_floating_point() else v for k, v in net.state_dict().items()})


def write_weight(net: Changing, rng: random.Random) -> None:
    with torch.no_grad():
        net.first.weight.mul_(1.1)


def other_index(net: Changing, rng: random.Random) -> None:
    net.index = torch.tensor([rng.randrange(6) for _ in range(4)])


def write_index(net: Changing, rng: random.Random) -> None:
    net.index[0] = rng.randrange(6)


def nothing(net: Changing, rng: random.Random) -> None:
    """Leave the network as it is."""


Change = Callable[[Changing, random.Random], None]
CHANGES: tuple[Change, ...] = (
    nothing, nothing, flag, flag, flag, number, momentum, epsilon, hook, freeze, replace_buffer, restride_buffer, share,
    other_weight, modes, whole_mode, load, write_weight, other_index, write_index,
)  # fmt: skip


def pull(out: Any) -> None:
    if out.requires_grad:
        out.square().sum().backward()


def ordinary(module: nn.Module, net: Changing, seed: int) -> None:
    pull(module(image(seed)))


def two_losses(module: nn.Module, net: Changing, seed: int) -> None:
    y = module(image(seed))
    if y.requires_grad:
        y.square().sum().backward(retain_graph=True)
        y.exp().mean().backward()


def two_calls(module: nn.Module, net: Changing, seed: int) -> None:
    pull(module(image(seed)) * module(image(seed + 50)))


def two_backwards(module: nn.Module, net: Changing, seed: int) -> None:
    outs = [module(image(seed)), module(image(seed + 50))]
    for out in outs if seed % 2 else reversed(outs):
        pull(out)


def other_size(module: nn.Module, net: Changing, seed: int) -> None:
    pull(module(image(seed, 1 + seed % 2, 3, 15, 31)))


def channels_last(module: nn.Module, net: Changing, seed: int) -> None:
    pull(module(image(seed).contiguous(memory_format=torch.channels_last)))


def without_grad(module: nn.Module, net: Changing, seed: int) -> None:
    with torch.no_grad():
        net.kept.append(module(image(seed)))


def inferring(module: nn.Module, net: Changing, seed: int) -> None:
    with torch.inference_mode():
        net.kept.append(module(image(seed)).clone())


def gradient_of_image(module: nn.Module, net: Changing, seed: int) -> None:
    x = image(seed).requires_grad_()
    pull(module(x))
    net.kept.append(x.grad)


def part_called_apart(module: nn.Module, net: Changing, seed: int) -> None:
    other = net.norm(net.first(image(seed + 70)))
    pull(module(image(seed)).square().sum() + other.square().mean())


def kept_image(module: nn.Module, net: Changing, seed: int) -> None:
    """Use one image in many steps, and write to its pixels between some."""
    if module is net:
        pull(module(net.pixels))
    else:
        net.image = LazyImage.from_tensor(net.pixels) if net.image is None else net.image
        pull(module(net.image))
    if seed % 3 == 0:
        with torch.no_grad():
            net.pixels.mul_(1.25)


def two_images(module: nn.Module, net: Changing, seed: int) -> None:
    """A loss of two lazy results."""
    a, b = image(seed), image(seed + 9)
    if module is not net:
        a, b = LazyImage.from_tensor(a), LazyImage.from_tensor(b)  # type: ignore[assignment]
    pull(module(a) - 0.5 * module(b))


def an_exception(module: nn.Module, net: Changing, seed: int) -> None:
    net.flags["fails"] = True
    with pytest.raises(ZeroDivisionError):
        module(image(seed))
    net.flags["fails"] = False
    for norm in (net.norm, net.instance):  # what the call did until then is plain PyTorch's affair
        norm.reset_running_stats()


def a_refusal(module: nn.Module, net: Changing, seed: int) -> None:
    if module is not net:
        net.flags["refused"] = True
        with pytest.raises(EngineError):
            module(image(seed))
        net.flags["refused"] = False
    else:
        net.steps += 1
    for norm in (net.norm, net.instance):  # a value that was asked for before the refusal has moved statistics
        norm.reset_running_stats()


Step = Callable[[nn.Module, Changing, int], None]
STEPS: tuple[Step, ...] = (
    ordinary, ordinary, ordinary, two_losses, two_calls, two_backwards, other_size, channels_last, without_grad,
    inferring, gradient_of_image, part_called_apart, kept_image, kept_image, two_images, an_exception, a_refusal,
)  # fmt: skip


def network(seed: int) -> Changing:
    torch.manual_seed(seed)
    net = Changing().double()
    net.kept, net.pixels, net.image = [], image(seed + 500), None  # type: ignore[assignment]
    return net


def compare_sequence(seed: int, options: dict[str, Any]) -> None:
    rng = random.Random(seed)
    plain = network(seed)
    twin = copy.deepcopy(plain)
    tiled = TiledModule(twin, **options)
    optimizers = [torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9) for net in (plain, twin)]
    possible = [
        step for step in STEPS if step is not a_refusal or "budget" not in options
    ]  # kept calls are not refused
    changes, steps = rng.sample(CHANGES, 5), rng.sample(possible, 4)
    for number in range(rng.randint(4, 9)):
        change, step, state = rng.choice(changes), rng.choice(steps), rng.random()
        for module, net in ((plain, plain), (tiled, twin)):
            change(net, random.Random(state))
            torch.manual_seed(number)
            step(module, net, number)
        assert_same(twin, plain)
        for a, b in zip(plain.kept, twin.kept, strict=True):
            assert (a is None) == (b is None) and (a is None or difference(b, a, 1e-3) < TOLERANCE)
        if rng.random() < 0.7:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        if rng.random() < 0.1:
            twin.image = None
            twin, plain = copy.deepcopy(twin), copy.deepcopy(plain)
            tiled = TiledModule(twin, **options)
            optimizers = [torch.optim.SGD(net.parameters(), 1e-3) for net in (plain, twin)]


@pytest.mark.usefixtures("shared_plans")
@pytest.mark.parametrize("options", OPTIONS)
def test_sequences_of_steps_between_which_something_changes(options: str, count: Callable[..., int]) -> None:
    for seed in (*range(count(ci=1, full=350)), random.SystemRandom().randrange(1000, 10**9)):
        try:
            compare_sequence(seed, OPTIONS[options])
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


# Nothing is recorded twice --------------------------------------------------------------------------------------------


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The work of recording: calls, nodes, and operators on tensors without data."""
    found: list[str] = []

    def noting(owner: Any, name: str, what: str) -> None:
        original = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            found.append(what)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    noting(record, "try_record", "call")
    noting(record.Recorder, "emit", "node")
    noting(record, "log_operators", "operators")
    return found


#: Each network in one mode; those that take long are like others.
SAMPLED = {
    "resnet18 of 2 channels": False, "unet of 2 channels": True, "vit of 32 channels": True,
    "convnext of 4 channels": False, "efficientnet-b0 of an eighth": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "train"),
    [
        pytest.param(name, train, marks=[] if SAMPLED.get(name) is train else [pytest.mark.full])
        for name in NETWORKS
        if name != "resnet18 of 4 channels"
        for train in (True, False)
    ],
)
def test_nothing_is_recorded_twice(name: str, train: bool, work: list[str]) -> None:
    torch.manual_seed(0)
    module = NETWORKS[name]().train(train)
    tiled = TiledModule(module, tiles=(1, 1))
    sizes = [(1, 3, 256, 256)] if "vit" in name else [(1, 3, 64, 96), (2, 3, 96, 64)]
    for step, size in enumerate(itertools.chain(sizes, sizes)):
        work.clear()
        tiled(torch.randn(size)).square().mean().backward()
        if step >= len(sizes):
            assert not work


# Random numbers -------------------------------------------------------------------------------------------------------


class Drawing(nn.Module):
    """Random numbers by position and by channel, in a map, its attention and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout2d(F.dropout(self.first(x), 0.3), 0.3)
        y = F.feature_alpha_dropout(F.alpha_dropout(F.rrelu(y, training=True), 0.2, True), 0.2, True)
        y = (y + torch.rand_like(y)) * torch.empty_like(y).bernoulli_(0.7)
        tokens = y[..., :9].flatten(2).transpose(1, 2)
        tokens = F.scaled_dot_product_attention(tokens, tokens, tokens, dropout_p=0.3)
        return self.head(F.dropout(y.mean((2, 3)) + tokens.mean(1), 0.3))


def drawn_step(tiled: nn.Module, x: Tensor, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    out = tiled(x)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), list(tiled.parameters()))]


def test_a_step_that_was_seen_draws_anew(work: list[str]) -> None:
    torch.manual_seed(0)
    net = Drawing().double()
    x, tiled = image(0), TiledModule(net, tiles=(2, 3))
    found = []
    for seed in (1, 2, 1, 3):
        work.clear()
        found.append(drawn_step(tiled, x, seed))
    assert not work
    for seed, step in zip((1, 2, 1, 3), found, strict=True):
        assert all(map(torch.equal, step, drawn_step(TiledModule(net, tiles=(2, 3)), x, seed)))
    assert all(map(torch.equal, found[0], found[2])) and not torch.equal(found[0][0], found[1][0])


def test_steps_that_wait_for_backward_keep_their_random_numbers() -> None:
    torch.manual_seed(0)
    net = Drawing().double()
    x, tiled, weights = image(0), TiledModule(net, tiles=(2, 3)), list(net.parameters())
    expected = [drawn_step(tiled, x, seed)[1:] for seed in (1, 2)]
    waiting = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        waiting.append(tiled(x).square().sum())
    for loss, gradients in zip(waiting, expected, strict=True):
        assert all(map(torch.equal, torch.autograd.grad(loss, weights), gradients))


def test_an_image_that_is_kept_gets_new_random_numbers_in_each_step() -> None:
    tiled = TiledModule(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Dropout(0.5)).double(), tiles=(2, 3))
    lazy = LazyImage.from_tensor(image(0), engine=tiled.engine)
    with torch.no_grad():
        first, second = (float(tiled.module(lazy).square().sum()) for _ in range(2))
    assert first != second


# Nothing is kept ------------------------------------------------------------------------------------------------------


def steps(module: nn.Module, count: int) -> Iterator[tuple[Tensor, weakref.ref[Any]]]:
    for seed in range(count):
        x = image(seed)
        out = module(x)
        yield out, weakref.ref(x)
        pull(out)


def test_compared_steps_hold_no_tensor_of_the_user() -> None:
    tiled = TiledModule(network(0), tiles=(2, 2))
    images = [ref for _, ref in steps(tiled, 4)]
    assert [ref() for ref in images] == [None] * 4
    target = [torch.ones(2, 4, dtype=torch.float64) for _ in range(3)]
    held = [weakref.ref(t) for t in target]
    for seed in range(3):
        lazy = LazyImage.from_tensor(image(seed))
        F.mse_loss(tiled(lazy), target[seed]).backward()
        del lazy
    target.clear()
    assert [ref() for ref in held] == [None] * 3


def test_what_is_remembered_is_bounded() -> None:
    net = network(0)
    tiled = TiledModule(net, tiles=(1, 1))
    for seed in range(transcript.MAX_ROOTS + 6):
        net.scale = 1.0 + seed
        pull(tiled(image(seed, 1, 3, 12 + seed, 12)))
        pull(tiled(image(seed)))
    roots = tiled.engine.transcripts.roots
    assert len(roots) == transcript.MAX_ROOTS
    for root in roots:
        assert root.size <= transcript.MAX_ENTRIES
        entries: list[transcript.Seen] = [root]
        while entries:
            entry = entries.pop()
            assert len(entry.following) <= transcript.MAX_FOLLOWING
            entries += entry.following
