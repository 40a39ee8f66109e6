"""What is recorded runs later, and backward later still: what may change in between gives plain PyTorch's numbers or an
error, never a number of its own."""

from __future__ import annotations

import copy
import gc
import random
import threading
from collections.abc import Callable
from contextvars import Context

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from lightning_plugin import BudgetError, LazyImage, TiledModule, TileSource, make_plan, materialize
from lightning_plugin.errors import RecordingError
from lightning_plugin.execute.backward import Backward
from lightning_plugin.source import TensorSource
from tests.exactness import TOLERANCE, asked, difference


def image(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size or (1, 3, 32, 30), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def same_gradients(net: nn.Module, twin: nn.Module) -> None:
    expected = dict(net.named_parameters())
    floor = 1e-3 * max(float(p.grad.abs().max()) for p in expected.values() if p.grad is not None)
    for name, p in twin.named_parameters():
        assert (p.grad is None) == (expected[name].grad is None), name
        if p.grad is not None:
            assert difference(p.grad, expected[name].grad, floor) < TOLERANCE, name


# requires_grad --------------------------------------------------------------------------------------------------------


class Toggles(nn.Module):
    """A discriminator that is frozen for one term of a loss, as in a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.d, self.g = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)

    def frozen_term(self, x: Tensor) -> Tensor:
        self.d.requires_grad_(False)
        out = (self.d(x) * self.g(x)).mean((2, 3))
        self.d.requires_grad_(True)
        return out

    def forward(self, x: Tensor, first: bool) -> Tensor:
        terms: list[Callable[[], Tensor]] = [lambda: self.frozen_term(x), lambda: self.d(x).square().mean((2, 3))]
        return sum(term() for term in (terms if first else reversed(terms)))  # type: ignore[return-value]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("options", [{"tiles": (2, 2)}, {"budget": "300KiB"}], ids=str)
def test_a_parameter_frozen_for_a_part_of_a_step(first, options):
    torch.manual_seed(0)
    net = Toggles().double()
    twin = copy.deepcopy(net)
    net(image(), first).sum().backward()
    TiledModule(twin, **options)(image(), first).sum().backward()
    same_gradients(net, twin)


@pytest.mark.parametrize("again", [True, False])
def test_a_parameter_frozen_after_it_was_used(again):
    """It gets a gradient if it is free when backward comes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3)).double()
    twin = copy.deepcopy(net)
    for module, x in ((net, image()), (twin, LazyImage.from_tensor(image(), engine=asked((2, 2))))):
        loss = module(x).square().mean()
        module[0].requires_grad_(False)
        loss = materialize(loss)
        module[0].requires_grad_(again)
        loss.backward()
    same_gradients(net, twin)


# Results and images ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"tiles": (2, 2)}, {"budget": "300KiB"}], ids=str)
@pytest.mark.parametrize(
    "reduce",
    [
        lambda t: t.logsumexp((2, 3)),
        lambda t: t.std((2, 3)),
        lambda t: t.norm(dim=(2, 3)),
        lambda t: t.amax((2, 3)),
        lambda t: t.mean((2, 3), keepdim=True),
        lambda t: t.flatten(2).max(2, keepdim=True).values,
        lambda t: F.adaptive_max_pool2d(t, 1),
        lambda t: t.flatten(2).topk(3, 2).values,
    ],
)
def test_a_result_written_to_before_backward(reduce, options):
    """Plain PyTorch refuses some of these; where it does not need the result, and here always, they are right."""

    class Reduced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return reduce(self.conv(x))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    net = Reduced().double()
    twin = copy.deepcopy(net)
    (net(image()) * 2).square().sum().backward()
    out = TiledModule(twin, **options)(image())
    out.mul_(2)
    out.square().sum().backward()
    same_gradients(net, twin)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).double()


def test_an_image_changed_before_backward():
    x = image()
    loss = TiledModule(small(), tiles=(2, 2))(x).square().mean()
    x.zero_()
    with pytest.raises(RecordingError, match=r"changed in place after forward.*x\.clone\(\)"):
        loss.backward()


def test_an_image_changed_before_it_is_read():
    x = image()
    loss = small()(LazyImage.from_tensor(x)).square().mean()
    x.zero_()
    with pytest.raises(RecordingError, match="changed in place after convolution in '0' used it"):
        loss.item()


def test_an_image_changed_between_two_uses():
    """Each use sees what the image was then, if what was recorded before has run."""
    x, net = image(), small()
    lazy = LazyImage.from_tensor(x, engine=asked((2, 2)))
    for _ in range(2):
        assert float(net(lazy).square().mean()) == pytest.approx(float(net(x).square().mean()), rel=1e-12)
        x.add_(1)


# Buffers --------------------------------------------------------------------------------------------------------------


def normalised(momentum: float | None = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum)).double()


class Flaky(TensorSource):
    """A source whose first read fails."""

    failed: list[bool]

    def read(self, box):
        if not self.failed:
            self.failed.append(True)
            raise OSError("the network was away")
        return super().read(box)


def statistics_after(act: Callable[[nn.Module, LazyImage | Tensor], object], lazy: bool, momentum: float | None):
    net = normalised(momentum)
    kept = act(net, LazyImage(TensorSource(image())) if lazy else image())
    del kept
    return [b.clone() for b in net.buffers()]


def dropped(net, x):
    with torch.no_grad():
        net(x)


def twice(net, x):
    net(x)
    net(x)


def read_early(net, x):
    out = net(x).mean()
    early = net[1].running_mean.clone()
    float(out)
    net[1].running_var.add_(early)


def reset(net, x):
    out = net(x).mean()
    net[1].reset_running_stats()
    float(out)


def saved(net, x):
    out = net(x).mean()
    state = {k: v.clone() for k, v in net.state_dict().items()}
    float(out)
    net.load_state_dict(state)


def copied(net, x):
    out = net(x).mean()
    other = copy.deepcopy(net)
    float(out)
    net[1].running_mean.copy_(other[1].running_mean * 2)


def evaluated_between(net, x):
    out = net(x).mean()
    net.eval()
    net[1].running_var.mul_(net(x).mean().detach() + 2)
    net.train()
    return out


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    "act", [dropped, twice, read_early, reset, saved, copied, evaluated_between], ids=lambda f: f.__name__
)
def test_running_statistics_are_those_of_plain_pytorch(act, momentum):
    for actual, expected in zip(statistics_after(act, True, momentum), statistics_after(act, False, momentum)):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_running_statistics_after_a_read_that_failed_and_was_repeated():
    net, plain = normalised(), normalised()
    source = Flaky(image())
    object.__setattr__(source, "failed", [])
    out = TiledModule(net, tiles=(2, 2))(LazyImage(source)).square().mean()
    with pytest.raises(OSError, match="away"):
        out.item()
    assert out.item() == pytest.approx(float(plain(image()).square().mean()), rel=1e-9)
    torch.testing.assert_close(dict(net.named_buffers()), dict(plain.named_buffers()), rtol=1e-9, atol=1e-9)
    assert type(net[1].running_mean) is Tensor, "an ordinary tensor again"


# Autograd -------------------------------------------------------------------------------------------------------------


def test_gradients_of_a_small_recorded_value():
    net, head = small(), nn.Linear(4, 1).double()
    lazy = net(LazyImage.from_tensor(image(), engine=asked((2, 2)))).mean((2, 3))
    plain = net(image()).mean((2, 3))
    expected = torch.autograd.grad(head(plain).sum(), plain)[0]
    torch.testing.assert_close(torch.autograd.grad(head(lazy).sum(), lazy)[0], expected)


def test_grad_cam_the_way_the_error_says():
    net, head = small(), nn.Linear(4, 1).double()
    features = net(LazyImage.from_tensor(image(), engine=asked((2, 2))))
    with pytest.raises(RecordingError, match=r"features = materialize\(x\)"):
        torch.autograd.grad(head(features.mean((2, 3))).sum(), features)
    whole = materialize(features)
    found = torch.autograd.grad(head(whole.mean((2, 3))).sum(), whole)[0]
    plain = net(image())
    torch.testing.assert_close(found, torch.autograd.grad(head(plain.mean((2, 3))).sum(), plain)[0])


def test_hooks_and_retained_gradients_of_small_values():
    seen: list[Tensor] = []

    def step(x):
        net = small()
        pooled = net(x).mean((2, 3))
        pooled.register_hook(lambda g: seen.append(g) or 2 * g)
        pooled.retain_grad()
        pooled.square().sum().backward()
        return pooled.grad, net[0].weight.grad

    expected = step(image())
    actual = step(LazyImage.from_tensor(image(), engine=asked((2, 2))))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(seen[1], seen[0])


def rows_of(x):
    """The first numbers of each image, which images are cut for where there are several."""
    return x.flatten(1)[:, :4]


def test_hooks_and_retained_gradients_of_results_for_each_image():
    seen: list[Tensor] = []

    def step(x):
        net = small()
        rows = rows_of(net(x))
        rows.register_hook(lambda g: seen.append(g) or 2 * g)
        rows.retain_grad()
        (rows.square().sum() + rows.sigmoid()[0].sum()).backward()
        return rows.grad, net[0].weight.grad

    several = torch.cat([image(), image().flip(2), image() / 2])
    expected = step(several)
    actual = step(LazyImage.from_tensor(several, engine=asked((2, 2))))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(seen[1], seen[0])


def test_a_hook_on_what_was_read_before_is_refused():
    several = torch.cat([image(), image()])
    rows = rows_of(small()(LazyImage.from_tensor(several, engine=asked((2, 2)))))
    squares = rows.square()
    with pytest.raises(RecordingError, match=r"register_hook.*that was read before.*features = materialize"):
        rows.register_hook(lambda g: 2 * g)
    squares.sum().backward()


def test_vmap_is_named():
    x = LazyImage.from_tensor(image())
    with pytest.raises(RecordingError, match=r"torch\.func \(vmap"):
        torch.func.vmap(torch.sin)(x)


def test_a_compiled_module_is_recorded_as_it_was_written():
    net = small()
    compiled = torch.compile(copy.deepcopy(net))
    out = TiledModule(compiled, tiles=(2, 2))(image())
    torch.testing.assert_close(out, net(image()))


def test_networks_in_threads():
    found: list[object] = []

    def work(seed: int) -> None:
        try:
            torch.manual_seed(seed)
            tiled = TiledModule(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), tiles=(2, 2))
            for _ in range(6):
                tiled(torch.randn(1, 3, 24, 24)).square().mean().backward()
            found.append(None)
        except BaseException as error:  # whatever it is, the test is told of it
            found.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [None] * 3


def test_values_of_two_threads_do_not_meet():
    made: list[Tensor] = []
    thread = threading.Thread(target=lambda: made.append(small()(LazyImage.from_tensor(image()))))
    thread.start()
    thread.join()
    with pytest.raises(RecordingError, match="two threads"):
        small()(LazyImage.from_tensor(image())) + made[0]


# Plans ----------------------------------------------------------------------------------------------------------------


def chain() -> nn.Module:
    layers: list[nn.Module] = []
    for i in range(3):
        layers += [nn.Conv2d(3 if not i else 8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))


@pytest.mark.slow
@pytest.mark.usefixtures("shared_plans")
@pytest.mark.parametrize("order", ["together", "first first", "last first"])
def test_a_budget_is_for_all_calls_of_a_step(order):
    """Whatever a step's calls hold stays under its budget, or an error names what would be enough."""
    torch.manual_seed(0)
    tiled = TiledModule(chain(), budget="1100KiB")
    try:
        losses = [tiled(torch.randn(1, 3, 64, 64)).square().sum() for _ in range(3)]
        for loss in [sum(losses)] if order == "together" else losses if order == "first first" else losses[::-1]:
            loss.backward()  # type: ignore[union-attr]
    except BudgetError as refused:
        assert refused.smallest > 1100 << 10
    assert tiled.peak_bytes <= 1100 << 10


def test_a_plan_for_pixels_that_lie_there_is_not_used_for_others():
    class Read(TensorSource):
        def read(self, box):
            return super().read(box).clone()

    source = Read(torch.randn(1, 3, 256, 256))
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 3, padding=1), nn.Tanh())
    tiled = TiledModule(net, budget="3300KiB")
    tiled(LazyImage.from_tensor(source.tensor)).mean().backward()
    plan = tiled.plan

    class Elsewhere(TileSource):
        shape, dtype = source.shape, source.dtype
        read, constant = source.read, source.constant

    tiled(LazyImage(Elsewhere())).mean().backward()
    assert tiled.plan is not plan
    assert tiled.peak_bytes <= 3300 << 10


def test_a_rehearsal_remembers_that_it_is_one(monkeypatch):
    """On CUDA backward runs in a thread with a context of its own."""
    run, tiles = Backward.run, []
    tile = Backward.pull_back_tile

    def in_a_fresh_context(self):
        return Context().run(run, self)

    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
    expected = make_plan(net, (1, 3, 96, 96), budget="250KiB")
    monkeypatch.setattr(Backward, "run", in_a_fresh_context)
    monkeypatch.setattr(Backward, "pull_back_tile", lambda self, *args: tiles.append(1) or tile(self, *args))
    assert make_plan(net, (1, 3, 96, 96), budget="250KiB") == expected
    assert tiles


class Block(nn.Module):
    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(i, o, 3, stride, 1), nn.Conv2d(o, o, 3, 1, 1)
        self.na, self.nb = nn.BatchNorm2d(o), nn.BatchNorm2d(o)
        self.down = nn.Conv2d(i, o, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.nb(self.b(F.relu(self.na(self.a(x)), inplace=True)))
        y += self.down(x)
        return F.relu(y)


def test_every_size_has_a_plan_or_a_budget_error(count):
    chance = random.Random(0)
    for _ in range(count(ci=1, full=200)):
        n, h, w = chance.randint(1, 6), chance.randint(1, 24), chance.randint(1, 24)
        budget = 1 << chance.randint(14, 24)
        net = nn.Sequential(Block(3, 4, 1), Block(4, 8, 2), nn.AdaptiveAvgPool2d(1)).train(chance.random() < 0.5)
        try:
            copy.deepcopy(net)(torch.zeros(n, 3, h, w))
        except ValueError as plain:  # BatchNorm's: a batch of one value has no variance
            with pytest.raises(type(plain), match="more than 1 value per channel"):
                make_plan(net, (n, 3, h, w), budget=budget)
            continue
        try:
            assert make_plan(net, (n, 3, h, w), budget=budget).peak_bytes <= budget
        except BudgetError as refused:
            assert refused.smallest > budget


@pytest.mark.parametrize("train", [True, False])
def test_rows_that_a_scan_carries_without_their_input(train):
    """Planning this network once ended in a KeyError: its result is written in place, and its input is not there."""
    net = nn.Sequential(Block(3, 4, 1), Block(4, 8, 2), nn.AdaptiveAvgPool2d(1)).train(train)
    assert make_plan(net, (2, 3, 24, 24), budget="150KiB").peak_bytes <= 150 << 10


# Batches --------------------------------------------------------------------------------------------------------------


def test_collated_images_keep_what_they_are():
    class Ahead(TensorSource):
        reads_ahead = True

        def prefetch(self, boxes) -> None:
            """Hears of boxes."""

    engine = asked((2, 2))
    images = [LazyImage(Ahead(image(seed=i)), requires_grad=True, engine=engine) for i in range(2)]
    for count in (1, 2):
        batch = default_collate(images[:count])
        assert batch.shape[0] == count and batch.requires_grad and batch.source.reads_ahead
        assert batch._session.engine is engine


class Torn(TileSource):
    """A source whose last tile cannot be read."""

    dtype = torch.float32

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def read(self, box):
        if box.hi == self.shape[2:]:
            raise OSError("torn")
        return torch.ones(*self.shape[:2], *box.extent)

    def constant(self, box):
        return None


def test_an_error_that_is_kept_keeps_no_maps():
    """Its traceback leads to all that the failed run has made."""
    net = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.Conv2d(5, 2, 3))
    tiled = TiledModule(net, tiles=(4, 4))
    with pytest.raises(OSError, match="torn") as kept:
        tiled(LazyImage(Torn((1, 3, 97, 89)))).sum().backward()
    size = 5 * 97 * 89
    assert not [t for t in gc.get_objects() if type(t) is Tensor and t.numel() == size]
    assert kept.value.__traceback__ is not None


def test_an_update_that_failed_is_not_waited_for():
    """A forward that failed has moved nothing: evaluated on the same image, the layer has the statistics it had."""
    layer = nn.BatchNorm2d(3)
    image = LazyImage(Torn((1, 3, 41, 37)), engine=TiledModule(layer, tiles=(3, 3)).engine)
    with pytest.raises(OSError, match="torn"):
        layer(image).sum().item()
    layer.eval()
    out = layer(image)
    assert out.shape == image.shape
    assert torch.equal(layer.running_mean, torch.zeros(3))


CHANGES: dict[str, Callable[[nn.Conv2d, Tensor], object]] = {
    "data replaced": lambda conv, x: setattr(conv.weight, "data", conv.weight.data + 1),
    "bias replaced": lambda conv, x: setattr(conv.bias, "data", conv.bias.data + 1),  # type: ignore[union-attr]
    "image refilled": lambda conv, x: x.numpy().__iadd__(1.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_pytorch_does_not_see_between_forward_and_backward_is_refused(name: str) -> None:
    """A tensor in other memory, and an image that was filled anew by NumPy."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).double()
    conv, x = net[0], torch.randn(1, 3, 20, 22, dtype=torch.float64)
    assert isinstance(conv, nn.Conv2d)
    tiled = TiledModule(net, tiles=2)
    for _ in range(2):
        out = tiled(x)
        CHANGES[name](conv, x)
        with pytest.raises(RecordingError, match="changed in place"):
            out.sum().backward()
    tiled(x).sum().backward()  # as it is now
