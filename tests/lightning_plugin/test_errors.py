"""What cannot be recorded or run is refused, with the operator, the module it is in, and the way out; never miscounted.

And what looks as if it could not work, but does: reading values, branching on them, copying.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_plugin import LazyImage, TiledModule, materialize
from lightning_plugin.errors import BudgetError, RecordingError
from tests.exactness import asked
from tests.zoo import fill


def image(requires_grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2, 3, 23, 31, generator=generator, dtype=torch.float64).requires_grad_(requires_grad)


def lazy(x: Tensor | None = None) -> LazyImage:
    return LazyImage.from_tensor(image() if x is None else x, engine=asked((3, 2), (2, 2)))


class Net(nn.Module):
    """A convolution, then whatever a test wants done at the path ``middle``."""

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.middle = Middle(middle)
        self.out = nn.Conv2d(4, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.middle(self.conv(x))).mean((2, 3))


class Middle(nn.Module):
    def __init__(self, func: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.func = func

    def forward(self, x: Tensor) -> Tensor:
        return self.func(x)


def net(middle: Callable[[Tensor], Tensor] = F.relu) -> nn.Module:
    return fill(Net(middle).double())


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(materialize(a), b, rtol=1e-9, atol=1e-11)


# What works ----------------------------------------------------------------------------------------------------------


def test_item_executes() -> None:
    model = net()
    loss = model(lazy()).sum()
    assert loss.item() == pytest.approx(model(image()).sum().item(), abs=1e-9)
    assert float(loss) == loss.item() == loss.tolist() and f"{loss:.3f}" == f"{loss.item():.3f}"
    loss.backward()
    assert model.conv.weight.grad is not None


@pytest.mark.parametrize("sign", [1, -1])
def test_a_branch_on_data_takes_the_right_way(sign: int) -> None:
    def branch(x: Tensor) -> Tensor:
        return F.relu(x) if sign * x.mean() > 0 else F.silu(x) * 2

    model = net(branch)
    twin, x, y = copy.deepcopy(model), image(True), image(True)
    model(lazy(x)).sum().backward()
    twin(y).sum().backward()
    same(x.grad, y.grad)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        same(a.grad, b.grad)


def test_printing_shows_values_of_vectors_and_sizes_of_maps() -> None:
    out = net()(lazy())
    assert repr(out) == repr(materialize(out)) and "LazyTensor" not in repr(out)
    assert repr(lazy()) == "LazyImage(shape=(2, 3, 23, 31), dtype=torch.float64, device='cpu')"


def test_backward_twice_with_retain_graph() -> None:
    model = net()
    twin = copy.deepcopy(model)
    for m, x in ((model, lazy()), (twin, image())):
        loss = m(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        same(a.grad, b.grad)


def test_backward_twice_without_it_is_refused_as_by_torch() -> None:
    loss = net()(lazy()).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_autograd_grad_of_parameters_and_image() -> None:
    model, x, y = net(), image(True), image(True)
    inputs = list(model.parameters())
    found = torch.autograd.grad(model(lazy(x)).sum(), [*inputs, x])
    expected = torch.autograd.grad(model(y).sum(), [*inputs, y])
    for a, b in zip(found, expected, strict=True):
        same(a, b)


def test_images_are_copied_and_pickled_by_source() -> None:
    x = lazy()
    same(copy.deepcopy(x), image())
    same(pickle.loads(pickle.dumps(x)), image())


def test_no_grad_and_inference_mode_run_forward_only() -> None:
    model = net()
    expected = model(image())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = model(lazy())
            same(out, expected.detach())
        assert not out.requires_grad


def test_a_write_into_a_real_tensor_executes() -> None:
    out = net()(lazy())
    kept = torch.zeros(3, 2, dtype=torch.float64)
    kept[1:] = out
    same(out, kept[1:])


# What is refused ------------------------------------------------------------------------------------------------------


def test_full_backward_hook_is_named() -> None:
    model = net()
    model.middle.register_full_backward_hook(lambda module, into, out: None)
    with pytest.raises(RecordingError, match=r"full backward hook.*in 'middle'.*Remove the hook"):
        model(lazy()).sum().backward()


def test_a_reentrant_checkpoint_is_refused_and_the_other_kind_named() -> None:
    with pytest.raises(RecordingError, match=r"in 'middle'.*Pass use_reentrant=False"):
        TiledModule(net(lambda x: checkpoint(torch.tanh, x, use_reentrant=True)), tiles=2)(image(True))


def penalty(model: nn.Module, x: Tensor) -> None:
    torch.autograd.grad(model(x).sum(), x, create_graph=True)


#: Ways to ask for a gradient of a gradient.
SECOND_ORDER: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "autograd.grad": penalty,
    "autograd.backward": lambda model, x: torch.autograd.backward(model(x).sum(), create_graph=True),
    "backward": lambda model, x: model(x).square().sum().backward(create_graph=True),
    "hvp": lambda model, x: torch.autograd.functional.hvp(lambda z: model(z).sum(), x, torch.ones_like(x)),
    "vhp": lambda model, x: torch.autograd.functional.vhp(lambda z: model(z).sum(), x, torch.ones_like(x)),
    "a computed value": lambda model, x: torch.autograd.grad(materialize(model(x).sum()), x, create_graph=True),
}


@pytest.mark.parametrize("way", SECOND_ORDER)
def test_gradients_of_gradients_are_refused(way: str) -> None:
    """Also where the gradient that comes in has no graph of its own, and where maps are kept."""
    how: list[dict[str, Any]] = [{"tiles": (3, 2)}, {"budget": "1GiB"}]
    models: list[nn.Module] = [TiledModule(net(torch.tanh), **options) for options in how]
    for model in (*models, lambda x: net(torch.tanh)(lazy(x))):
        with pytest.raises(RecordingError, match=r"create_graph.*gradients of gradients.*crop"):
            SECOND_ORDER[way](model, image(True))


def test_gradients_of_gradients_are_refused_in_chains_and_below_the_device() -> None:
    layers = [layer for _ in range(6) for layer in (nn.Conv2d(3, 3, 3, padding=1), nn.Tanh())]
    model = fill(nn.Sequential(*layers).double())
    for options in ({"chains": "always", "budget": "400KiB"}, {"parameters": "disk", "budget": "300KiB"}):
        with pytest.raises(RecordingError, match=r"create_graph.*gradients of gradients.*crop"):
            penalty(TiledModule(model, **options), image(True))


def by_batches(model: nn.Module, x: Tensor) -> None:
    z = x.requires_grad_()
    torch.autograd.grad(model(z)[0], z, torch.eye(2, dtype=x.dtype), is_grads_batched=True)


def counted(model: nn.Module, x: Tensor) -> None:
    with FlopCounterMode(display=False):
        model(x)


#: Ways to call a module within a transformation, and the way out that is named.
TRANSFORMED: dict[str, tuple[Callable[[nn.Module, Tensor], object], str]] = {
    "grad": (lambda model, x: torch.func.grad(lambda z: model(z).sum())(x), "torch.autograd.grad"),
    "grad of parameters": (
        lambda model, x: torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(
            {name: p.detach() for name, p in model.named_parameters()}
        ),
        "torch.autograd.grad",
    ),
    "jacrev": (lambda model, x: torch.func.jacrev(model)(x), "torch.autograd.grad"),
    "jvp": (lambda model, x: torch.func.jvp(model, (x,), (x,)), "torch.autograd.grad"),
    "vmap": (lambda model, x: torch.vmap(model)(x[None]), "give a batch"),
    "several gradients": (by_batches, "retain_graph"),
    "FLOPs": (counted, "materialize"),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformations_are_refused_with_a_way_out(name: str) -> None:
    transform, way_out = TRANSFORMED[name]
    with pytest.raises(RecordingError, match=way_out):
        transform(TiledModule(net(), tiles=(2, 2)), image())


def test_a_parameter_changed_before_its_operator_ran() -> None:
    model = net()
    loss = model(lazy()).sum()
    with torch.no_grad():
        model.out.weight.mul_(2)
    with pytest.raises(RecordingError, match=r"changed in place after convolution in 'out'.*loss.item\(\)"):
        loss.backward()


def test_a_parameter_changed_before_a_map_is_used_again() -> None:
    """In plain PyTorch the features are those of the old weights; to recompute them with the new ones is wrong."""
    model = net()
    features = model.conv(lazy())
    features.square().mean().backward()
    with torch.no_grad():
        model.conv.weight.sub_(0.1)
    with pytest.raises(RecordingError, match=r"changed in place after convolution used it.*recorded first"):
        features.mean().backward()


def test_a_parameter_changed_between_forward_and_backward() -> None:
    model = net()
    loss = materialize(model(lazy()).sum())
    with torch.no_grad():
        model.out.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place before backward"):
        loss.backward()


def test_a_stale_alias_is_refused() -> None:
    """A write that cannot be followed; see test_views for those that can."""

    def overwritten(x: Tensor) -> Tensor:
        part = x.unfold(1, 2, 2)
        x.relu_()
        return x + part.mean((1, 4))[:, None]

    with pytest.raises(RecordingError, match=r"mean in 'middle'.*shares memory.*clone"):
        net(overwritten)(lazy())


@pytest.mark.parametrize(
    "write",
    [
        lambda y: y.add_(y, alpha=torch.tensor(2.0)),
        lambda y: y[:, 0].addcmul_(y[:, 1], y[:, 2], value=torch.tensor(2.0)),
        lambda y: F.threshold(y, torch.tensor(0.1), 0.0, inplace=True),
        lambda y: torch.add(y, y, alpha=torch.tensor(2.0), out=y),
    ],
    ids=["in place", "into a view", "by name", "out"],
)
def test_a_write_that_asks_for_a_number_is_refused(write: Callable[[Tensor], Tensor]) -> None:
    """It was made into a copy, and lost."""
    with pytest.raises(RecordingError, match="in place"):
        write(lazy() * 1)


def test_requires_grad_on_maps_is_refused() -> None:
    with pytest.raises(RecordingError, match=r"from_tensor"):
        lazy().requires_grad_()
    with torch.no_grad():
        out = net().conv(lazy())
    with pytest.raises(RecordingError, match=r"requires_grad_\(\).*features = materialize"):
        out.requires_grad_()


@pytest.mark.parametrize("name", ["retain_grad", "data_ptr", "untyped_storage"])
def test_what_needs_memory_is_refused(name: str) -> None:
    with pytest.raises(RecordingError, match=rf"{name}\(\)"):
        getattr(net().conv(lazy()), name)()


def test_a_product_that_resizes_the_tensor_it_is_added_to_is_refused() -> None:
    small = net().conv(lazy()).mean().reshape(1, 1)
    factors = torch.ones(2, 3, 4), torch.ones(2, 4, 5)
    with pytest.raises(RecordingError, match=r"addbmm_\(\).*addbmm\(\)"):
        small.addbmm_(*factors)
    assert small.expand(3, 5).clone().addbmm_(*factors).shape == (3, 5)


def test_hooks_on_recorded_tensors_are_refused() -> None:
    with pytest.raises(RecordingError, match=r"register_hook.*never held whole.*features = materialize"):
        net().conv(lazy()).register_hook(lambda g: g)


def test_pickling_a_result_says_what_to_do() -> None:
    with pytest.raises(RecordingError, match=r"no data yet.*item\(\)"):
        pickle.dumps(net().conv(lazy()))


def test_an_operator_of_another_library_below_recording_is_named() -> None:
    """An extension that takes the tensor apart below Python gets an answer, not a crash."""
    with pytest.raises(RecordingError, match="rule"), torch._C.DisableTorchFunctionSubclass():
        torch.sin(net().conv(lazy()))


def test_images_of_other_sizes_do_not_meet() -> None:
    other = LazyImage.from_tensor(torch.randn(2, 3, 9, 9, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="broadcast"):
        lazy() + other


def test_the_wrapper_takes_small_inputs_beside_images() -> None:
    class Conditioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.fc = nn.Linear(5, 4)

        def forward(self, x: Tensor, extra: Tensor) -> Tensor:
            return (self.conv(x) * self.fc(extra)[..., None, None]).mean((2, 3))

    model, extra = fill(Conditioned().double()), torch.randn(2, 5, dtype=torch.float64)
    same(TiledModule(model, tiles=(2, 2))(image(), extra), model(image(), extra))


# Tangents ------------------------------------------------------------------------------------------------------------


def dual(t: Tensor) -> Tensor:
    return forward_ad.make_dual(t.detach(), torch.ones_like(t))


def with_dual_parameters(name: str) -> Callable[[nn.Module], Any]:
    def call(tiled: nn.Module) -> Any:
        child = tiled.get_submodule(f"module.{name}")
        for key, p in list(child.named_parameters()):
            del child._parameters[key]
            setattr(child, key, dual(p))
        return tiled(image())

    return call


TANGENTS: dict[str, Callable[[nn.Module], Any]] = {
    "of a convolution": with_dual_parameters("conv"),
    "of a norm": with_dual_parameters("norm"),
    "of a linear layer on a vector": with_dual_parameters("head"),
    "of an image": lambda tiled: tiled(dual(image())),
    "of a recorded map": lambda tiled: forward_ad.make_dual(lazy().relu(), image()),
}


class WithNorms(nn.Module):
    """Two BatchNorms around a function, and a head."""

    def __init__(self, middle: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.first, self.conv, self.norm = nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None)
        self.head = nn.Linear(4, 2)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.middle(self.conv(self.first(x)))).square().mean((2, 3)))


@pytest.mark.parametrize("how", [{"tiles": (2, 3)}, {"budget": "1GiB"}], ids=["tiled", "kept"])
@pytest.mark.parametrize("what", TANGENTS)
def test_tangents_are_refused_by_name_and_move_no_statistics(what: str, how: dict) -> None:
    """With dual weights the tangent was lost in silence under tiles."""
    net = WithNorms().double()
    before = copy.deepcopy(dict(net.named_buffers()))
    with forward_ad.dual_level(), pytest.raises(RecordingError, match=r"torch\.autograd\.forward_ad.*Use backward"):
        TANGENTS[what](TiledModule(net, **how))
    for name, b in net.named_buffers():
        assert torch.equal(b, before[name]), name


# A step that is refused ----------------------------------------------------------------------------------------------


def refused_while_recorded(net: WithNorms) -> None:
    net.middle = lambda y: y.register_hook(print)  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(RecordingError):
        TiledModule(net, tiles=2)(image())


def refused_by_a_budget(net: WithNorms) -> None:
    with pytest.raises(BudgetError):
        TiledModule(net, budget="2KiB")(image())


def refused_in_backward_of_an_image(net: WithNorms) -> None:
    net.middle = lambda y: y.register_hook(print)  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(RecordingError):
        TiledModule(net, tiles=2)(lazy())


@pytest.mark.parametrize("refuse", [refused_while_recorded, refused_by_a_budget, refused_in_backward_of_an_image])
def test_a_refused_step_changes_nothing_and_the_next_is_the_first(refuse: Callable[[WithNorms], None]) -> None:
    """The count of batches is the weight of a batch where ``momentum`` is None."""
    net = WithNorms().double()
    plain = copy.deepcopy(net)
    refuse(net)
    for name, b in net.named_buffers():
        assert torch.equal(b, plain.get_buffer(name)), name
    net.middle = plain.middle
    TiledModule(net, tiles=2)(image())
    plain(image())
    for name, b in net.named_buffers():
        torch.testing.assert_close(b, plain.get_buffer(name))


def test_a_refused_call_leaves_the_updates_of_an_earlier_call_on_the_image() -> None:
    net = WithNorms().double()
    plain = copy.deepcopy(net)
    x = lazy()
    first = TiledModule(net, tiles=2)(x)
    net.middle = lambda y: y.register_hook(print)  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(RecordingError):
        TiledModule(net, tiles=2)(x)
    plain(image())
    for name, b in plain.named_buffers():
        torch.testing.assert_close(net.state_dict()[name], b)
    assert first.isfinite().all()
