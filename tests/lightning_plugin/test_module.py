"""What a user of `TiledModule`, `LazyImage` and `check` meets."""

import copy
import inspect
import itertools
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from lightning_plugin import (
    Box,
    LazyImage,
    RecordingError,
    TensorSource,
    TiledModule,
    TileSource,
    check,
    materialize,
)
from tests.exactness import TOLERANCE, assert_same_step, difference
from tests.lightning_plugin.test_identical_tiles import counted
from tests.lightning_plugin.tiers import Way, image, network

pytestmark = pytest.mark.usefixtures("shared_plans")


class Ramp(TileSource):
    """A source that computes its pixels, so that it can be as large as it likes."""

    def __init__(self, height: int, width: int) -> None:
        self.shape = (1, 2, height, width)
        self.dtype = torch.float32
        self.read_boxes: list[Box] = []

    def read(self, box: Box) -> torch.Tensor:
        self.read_boxes.append(box)
        rows = torch.arange(box.lo[0], box.hi[0], dtype=torch.float32).view(1, 1, -1, 1)
        columns = torch.arange(box.lo[1], box.hi[1], dtype=torch.float32).view(1, 1, 1, -1)
        return torch.cat([rows.expand(1, 1, -1, columns.shape[-1]), columns.expand(1, 1, rows.shape[2], -1)], 1)

    def constant(self, box: Box) -> None:
        return None


class Slides(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"image": LazyImage(Ramp(30, 40)), "label": index}


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.AdaptiveAvgPool2d(1))


def test_a_huge_image_is_recorded_and_nothing_is_read() -> None:
    source = Ramp(1_000_000, 1_000_000)
    out = net()(LazyImage(source))
    assert out.shape == (1, 3, 1, 1) and out.requires_grad and not source.read_boxes


def test_results_are_ordinary_tensors_for_ordinary_inputs() -> None:
    module = net().eval()
    x = torch.randn(2, 2, 31, 29)
    tiled = TiledModule(module, tiles=(3, 4))
    out = tiled(x)
    assert type(out) is torch.Tensor
    torch.testing.assert_close(out, module(x))
    dense = TiledModule(nn.Conv2d(2, 3, 5), tiles=4)
    torch.testing.assert_close(dense(x), dense.module(x))
    assert dense.plan is not None and dense.plan.segments[0].forward.counts == (4, 4, 1)


def test_tiles_are_read_with_their_halo_and_no_more() -> None:
    source = Ramp(64, 64)
    materialize(TiledModule(nn.Conv2d(2, 1, 3, padding=1), tiles=(2, 2))(LazyImage(source)).sum())
    assert sorted(source.read_boxes) == [
        Box((0, 0), (33, 33)), Box((0, 31), (33, 64)), Box((31, 0), (64, 33)), Box((31, 31), (64, 64)),
    ]  # fmt: skip


@pytest.mark.parametrize("workers", [0, 2])
def test_images_go_through_a_data_loader(workers: int) -> None:
    loader = DataLoader(Slides(), batch_size=2, num_workers=workers)
    batches = list(loader)
    assert [tuple(b["image"].shape) for b in batches] == [(2, 2, 30, 40)] * 2
    module = net().eval()
    plain = module(torch.cat([Ramp(30, 40).read(Box.whole((30, 40)))] * 2))
    torch.testing.assert_close(materialize(module(batches[1]["image"])), plain)


def test_images_of_different_sizes_do_not_collate() -> None:
    with pytest.raises(ValueError, match="image 1 is"):
        next(iter(DataLoader([LazyImage(Ramp(8, 8)), LazyImage(Ramp(8, 9))], batch_size=2)))  # type: ignore[arg-type]


def test_an_image_can_be_pickled_copied_moved_and_pinned() -> None:
    image = LazyImage(TensorSource(torch.randn(1, 2, 8, 8)))
    again = pickle.loads(pickle.dumps(image))
    assert again.shape == image.shape and torch.equal(again.source.read(Box.whole((8, 8))), image.source.tensor)
    assert copy.deepcopy(image) is image and image.pin_memory() is image and image.to("cpu") is image
    assert image.to(torch.float64).dtype == torch.float64


def test_the_wrapper_changes_nothing_of_the_module() -> None:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    tiled = TiledModule(module, tiles=2)
    assert [id(p) for p in tiled.parameters()] == [id(p) for p in module.parameters()]
    assert list(tiled.state_dict()) == list(module.state_dict())
    before = module[0].weight.detach().clone()  # type: ignore[index]
    tiled(torch.randn(1, 2, 16, 16)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, module[0].weight)  # type: ignore[index]
    tiled.eval()
    assert not module.training


def test_small_arguments_go_in_as_they_are() -> None:
    class Conditioned(nn.Module):
        def forward(self, x: torch.Tensor, age: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
            return (x * age.view(-1, 1, 1, 1)).mean((2, 3)) * scale, age

    x, age = torch.randn(2, 3, 9, 9), torch.tensor([2.0, 3.0])
    pooled, same = TiledModule(Conditioned(), tiles=2)(x, age, scale=2.0)
    torch.testing.assert_close(pooled, (x * age.view(-1, 1, 1, 1)).mean((2, 3)) * 2)
    assert same is age


def test_budget_and_tiles_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="the planner chooses the tiles"):
        TiledModule(net(), budget="1GiB", tiles=2)


def test_check_reports_exactness_and_names_barriers() -> None:
    class Running(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sort(x, dim=2).values

    report = check(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Dropout(0.5), Running(), nn.Conv2d(3, 2, 3)), (1, 2, 9, 9))
    assert report.exact and report and "gradient of 0.weight" in report.errors
    assert report.barriers == ("sort in '2'",)
    assert any("dropout" in s for s in report.skipped)
    assert "exact" in str(report)


def test_check_sees_a_difference() -> None:
    calls = itertools.count()

    class Different(nn.Module):
        """No two calls have one result."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean((2, 3)) + next(calls)

    report = check(Different(), (1, 2, 9, 9))
    assert not report.exact and "differs" in str(report)


def test_check_asks_for_another_image_where_plain_pytorch_finds_no_number() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3))
    with pytest.raises(ValueError, match="not finite: check another image"):
        check(net, torch.full((1, 2, 9, 9), torch.inf))


@pytest.mark.parametrize("how", [{"tiles": 2}, {"budget": "4MiB"}])
def test_inference_mode_needs_no_plain_tensors(how: dict[str, object]) -> None:
    with torch.inference_mode():
        module = net().eval()
        x, weight = torch.randn(1, 2, 20, 20), torch.randn(20, 20)

        class Weighted(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return module(x * weight)

        torch.testing.assert_close(TiledModule(Weighted(), **how)(x), module(x * weight))  # type: ignore[arg-type]


@pytest.mark.parametrize("way", [Way(tiers=("disk",), parameters=("disk", "host")), Way(budget=150_000)])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_tiled_module_begins_anew(
    way: Way, how: Callable[[TiledModule], TiledModule], tmp_path: Path
) -> None:
    """As an average of weights makes one: it has the options, and nothing of what steps of the first have held."""
    tiled, fresh = way.tiled(network(), tmp_path), way.tiled(network(), tmp_path)
    waiting = tiled(image(0, 0)).sum()  # the first holds something while it is copied
    other, plain = how(tiled), copy.deepcopy(tiled.module)
    assert_same_step(plain, other.module, plain(image(0, 1)).sum(), other(image(0, 1)).sum())
    fresh(image(0, 1)).sum().backward()
    assert other.plan == fresh.plan and other.peak_bytes == fresh.peak_bytes
    waiting.backward()


@dataclass
class Result:
    map: torch.Tensor
    more: object = None


class Plain:
    def __init__(self, inner: object) -> None:
        self.inner, self.me = inner, self


class Wraps(nn.Module):
    def __init__(self, wrap: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.net, self.wrap = net(), wrap

    def forward(self, x: torch.Tensor) -> object:
        return self.wrap(self.net[0](x))


def tensors_in(thing: object, seen: set[int]) -> list[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        return [thing]
    if id(thing) in seen or isinstance(thing, nn.Module):
        return []
    seen.add(id(thing))
    parts = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, (list, tuple)) else ()
    parts = vars(thing).values() if hasattr(thing, "__dict__") else parts
    return [t for part in parts for t in tensors_in(part, seen)]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: Result(y, {"mean": (y.mean(), 3, "s")}),
        lambda y: [Plain(Result(y, Plain([y.sum()])))],
        lambda y: Result(y.mean((2, 3))),
    ],
)
def test_results_within_objects_are_ordinary_tensors(wrap: Callable[[torch.Tensor], object]) -> None:
    module = Wraps(wrap).double()
    x = torch.randn(1, 2, 20, 18, dtype=torch.float64)
    for _ in range(2):
        expected, actual = (tensors_in(f(x), set()) for f in (module, TiledModule(module, tiles=2)))
        assert len(actual) == len(expected) > 0
        for a, b in zip(actual, expected, strict=True):
            assert type(a) is torch.Tensor
            torch.testing.assert_close(a, b)


class Named(nn.Module):
    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return pixel_values if labels is None else labels


class Subclass(TiledModule):
    pass


@pytest.mark.parametrize("kind", [TiledModule, Subclass])
def test_a_wrapper_and_its_class_have_the_signature_of_what_they_wrap(kind: type[TiledModule]) -> None:
    tiled, image = kind(Named(), tiles=2), torch.randn(1, 2, 8, 8)
    for other in (tiled, copy.deepcopy(tiled), pickle.loads(pickle.dumps(tiled)), kind(tiled, tiles=2)):
        assert isinstance(other, kind)
        assert inspect.signature(other.forward) == inspect.signature(Named().forward)
        assert inspect.signature(type(other).forward) == inspect.signature(Named.forward)
        assert torch.equal(other(pixel_values=image), image)
    assert "labels" not in inspect.signature(kind.forward).parameters
    assert pickle.dumps(tiled).count(b"Named]") == 0, "the class of one module's wrapper cannot be imported"


def test_a_subclass_with_a_forward_of_its_own_keeps_it() -> None:
    class Doubled(TiledModule):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)  # type: ignore[no-any-return]

    tiled, image = Doubled(Named(), tiles=2), torch.randn(1, 2, 8, 8)
    assert torch.equal(tiled(image), 2 * image)
    assert inspect.signature(type(tiled).forward) == inspect.signature(Doubled.forward)


def two(first: dict[str, object], second: dict[str, object]) -> tuple[TiledModule, TiledModule, LazyImage]:
    torch.manual_seed(0)
    a, b = (nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Tanh()).double() for _ in range(2))
    x = torch.randn(1, 2, 96, 96, dtype=torch.float64, requires_grad=True)
    return TiledModule(a, **first), TiledModule(b, **second), LazyImage.from_tensor(x)  # type: ignore[arg-type]


BUDGET: dict[str, object] = {"budget": "900KiB"}
WHOLE: dict[str, object] = {"tiles": (1, 1)}


@pytest.mark.parametrize(("first", "second"), [(BUDGET, WHOLE), (WHOLE, BUDGET)])
def test_maps_of_two_modules_meet_under_the_options_of_neither(
    first: dict[str, object], second: dict[str, object]
) -> None:
    a, b, image = two(first, second)
    for _ in range(2):
        kept = a(image)
        with pytest.raises(RecordingError, match=r"with .* and of one with .*materialize\(x\)"):
            (kept + b(image)).sum().backward()
        with pytest.raises(RecordingError, match="the same options"):
            materialize(b(kept[:, :2]))
        whole = materialize(kept)
        assert not any(p.grad is not None for p in (*a.parameters(), *b.parameters()))
        (whole + b(image)).sum().backward()
        del kept, whole
        for p in (image.source.tensor, *a.parameters(), *b.parameters()):  # type: ignore[attr-defined]
            p.grad = None


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [(BUDGET, WHOLE, False), (WHOLE, BUDGET, True), (BUDGET, {"budget": 950_000}, True)],
)
def test_modules_that_share_an_image_keep_each_its_own_options(
    first: dict[str, object], second: dict[str, object], together: bool
) -> None:
    """One after the other, with a map of the first still held; and in one loss, where only numbers of theirs meet."""
    a, b, image = two(first, second)
    x = image.source.tensor  # type: ignore[attr-defined]
    plain = [copy.deepcopy(m.module) for m in (a, b)]

    def losses(one: nn.Module, other: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        y = one(x)
        z = other(x) * y.mean().tanh() if together else other(x)
        return [y.square().sum(), z.square().sum()]

    for _ in range(2):
        expected = losses(plain[0], plain[1], x)
        sum(expected).backward()
        grad, x.grad = x.grad, None
        held = a(image)
        materialize(held.mean())
        plain[0](x)  # moves its statistics, too
        found = losses(a, b, image)
        if together:
            (found[0] + found[1]).backward()
        else:
            del held
            found[1].backward()
            found[0].backward()
        torch.testing.assert_close(x.grad, grad, rtol=1e-9, atol=1e-9)
        x.grad = None
        for actual, wanted in zip((a.module, b.module), plain, strict=True):
            for p, q in zip(actual.parameters(), wanted.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-9)
            for p, q in zip(actual.buffers(), wanted.buffers(), strict=True):
                torch.testing.assert_close(p, q)
        for tiled, options in ((a, first), (b, second)):
            assert tiled.plan is not None and (tiled.plan.budget is None) == ("tiles" in options)
            assert "tiles" in options or tiled.peak_bytes <= tiled.engine.options.budget


def test_modules_with_the_same_options_run_together() -> None:
    a, b, image = two(BUDGET, BUDGET)
    x = image.source.tensor  # type: ignore[attr-defined]
    torch.testing.assert_close(materialize(a(image) + b(image)), a.module(x) + b.module(x))


def test_a_module_within_another_is_run_by_the_options_of_the_outer() -> None:
    a, b, image = two(BUDGET, WHOLE)
    outer = TiledModule(nn.Sequential(a, nn.Conv2d(3, 2, 1).double(), b), tiles=3)
    x = image.source.tensor  # type: ignore[attr-defined]
    torch.testing.assert_close(materialize(outer(image)), nn.Sequential(a.module, outer.module[1], b.module)(x))
    assert outer.plan is not None and a.plan is None and b.plan is None


def test_several_gradients_at_once_are_refused_where_a_head_follows_the_tiles() -> None:
    module = nn.Sequential(net(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LazyLinear(2))
    x = torch.randn(1, 2, 20, 20, requires_grad=True)
    module(x)
    y = TiledModule(module, tiles=2)(x)
    with pytest.raises(RecordingError, match="retain_graph=True"):
        torch.autograd.grad(y, x, torch.eye(2)[:, None], is_grads_batched=True)


@pytest.mark.parametrize("convert", [torch.jit.script, lambda m: torch.jit.trace(m, torch.randn(1, 2, 20, 20))])
def test_scripted_modules_are_refused(convert: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(RecordingError, match=r"before torch\.jit\.script"):
        TiledModule(nn.Sequential(convert(nn.Conv2d(2, 3, 3))), tiles=2)


class Headed(nn.Module):
    """A tiled trunk and a head of its own."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(2, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x).mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("within", [False, True])
def test_under_torch_compile_a_tiled_module_is_called_as_ever(within: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).double()
    plain = Headed(net) if within else net
    tiled = copy.deepcopy(plain)
    wrapped = TiledModule(tiled.trunk if within else tiled, tiles=(2, 2))
    if within:
        tiled.trunk = wrapped
    compiled = torch.compile(tiled if within else wrapped, backend="eager")
    x = torch.randn(1, 3, 20, 22, dtype=torch.float64)
    plain(x).square().sum().backward()
    for _ in range(2):
        tiled.zero_grad()
        compiled(x).square().sum().backward()
        for mine, theirs in zip(tiled.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-9)
    assert wrapped.plan is not None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_step_pulls_tiles_back_as_ever() -> None:
    """The user compiles the whole step, and with it the call of backward."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)).double()
    tiled = TiledModule(copy.deepcopy(plain), tiles=(2, 2))

    @torch.compile(backend="eager")
    def step(x: Tensor) -> Tensor:
        loss = tiled(x).square().mean()
        loss.backward()
        return loss.detach()

    for _ in range(2):
        x = torch.randn(1, 3, 20, 22, dtype=torch.float64)
        loss = plain(x).square().mean()
        loss.backward()
        torch.testing.assert_close(step(x), loss.detach(), rtol=0, atol=1e-9)
        for mine, theirs in zip(tiled.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-9)


class TwoResults(nn.Module):
    """A map, and another that is made of it: whole, or in tiles."""

    def __init__(self, tiled: bool) -> None:
        super().__init__()
        self.first, self.second, self.tiled = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3), tiled

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = materialize(self.first(x).tanh())
        return h, materialize(self.second(LazyImage.from_tensor(h) if self.tiled else h))


@pytest.mark.parametrize("tiled", [False, True])
def test_a_result_that_is_held_whole_has_the_gradient_of_another(tiled: bool) -> None:
    torch.manual_seed(0)
    net = TwoResults(tiled).double()
    x = torch.randn(1, 3, 20, 24, dtype=torch.float64, requires_grad=True)

    def gradients(run: nn.Module) -> list[Tensor]:
        h, y = run(x)
        return [*torch.autograd.grad(y.square().sum() + h.sum(), [h, x, net.first.weight])]

    found = gradients(TiledModule(net, tiles=(2, 2)))
    net.tiled = False
    for one, other in zip(found, gradients(net), strict=True):
        assert difference(one, other) < TOLERANCE


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.other = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.trunk(x).tanh()
        return {"one": self.one(h), "other": self.other(h)}


def test_maps_that_a_module_returns_are_computed_together() -> None:
    """The trunk of two heads runs once: the tiles of a step are those of one map."""
    net, x = TwoHeads().double(), torch.randn(1, 3, 20, 24, dtype=torch.float64)
    tiled = TiledModule(net, tiles=(2, 2))
    count = counted(tiled)
    for _ in range(2):
        count.tiles = 0
        found, expected = tiled(x), net(x)
        assert count.tiles == 4
        assert all(difference(found[name].detach(), expected[name].detach()) < TOLERANCE for name in expected)


@pytest.mark.parametrize("how", [{"tiles": (2, 1)}, {"budget": "64MiB"}])
def test_a_column_of_a_transposed_image_is_an_image(how: dict[str, object]) -> None:
    """Its last dimension counts one, so it is contiguous with any stride there."""
    net = nn.Conv2d(1, 2, (3, 1), padding=(1, 0)).double()
    column = torch.randn(1, 1, 3, 4, dtype=torch.float64).transpose(2, 3)[..., :1]
    assert column.is_contiguous() and column.stride(-1) > 1
    tiled = TiledModule(copy.deepcopy(net), **how)  # type: ignore[arg-type]
    assert_same_step(net, tiled.module, net(column).square().sum(), tiled(column).square().sum())


class Checkpointed(nn.Module):
    """Reads a value within a region that PyTorch recomputes in backward: there it is planned and run."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1))

    def region(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y if bool(y.sum() < 100) else y.tanh()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.region, x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("budget", [8000, 60000])
def test_a_value_may_be_read_within_a_checkpointed_region(budget: int) -> None:
    net = Checkpointed().double()
    tiled = TiledModule(copy.deepcopy(net), budget=budget)
    x = torch.randn(1, 3, 12, 12, dtype=torch.float64)
    net(x).square().sum().backward()
    tiled(x).square().sum().backward()
    assert tiled.plan is not None and tiled.plan.segments[0].keep == (budget == 60000)
    for p, q in zip(net.parameters(), tiled.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)
    norms = [m for n in (net, tiled.module) for m in n.modules() if isinstance(m, nn.BatchNorm2d)]
    torch.testing.assert_close(norms[1].running_mean, norms[0].running_mean)
    torch.testing.assert_close(norms[1].running_var, norms[0].running_var)


@dataclass(slots=True)
class Slotted:
    map: torch.Tensor
    mean: object = None


@pytest.mark.parametrize("wrap", [lambda y: Slotted(y, {"mean": y.mean()}), lambda y: Result(y, Slotted(y * 2))])
def test_results_in_slots_are_computed(wrap: Callable[[torch.Tensor], object]) -> None:
    found = TiledModule(Wraps(wrap).double(), tiles=2)(torch.randn(1, 2, 22, 18, dtype=torch.float64))
    inner = found.more if isinstance(found, Result) else found
    assert type(found.map) is torch.Tensor and type(inner.map) is torch.Tensor
    if inner is found:
        assert type(found.mean["mean"]) is torch.Tensor
