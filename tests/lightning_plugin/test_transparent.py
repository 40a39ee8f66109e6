"""A `TiledModule` has the wrapped module's names, state, attributes and children."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.swa_utils import AveragedModel

from lightning_plugin import RecordingError, TiledModule

X = torch.randn(1, 3, 12, 14)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.head = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.zeros(1))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.rate = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x)) * self.scale * self.rate + self.shift  # type: ignore[no-any-return]

    def features(self, x: Tensor) -> Tensor:
        return self.body(x).mean((2, 3))  # type: ignore[no-any-return]

    @property
    def classes(self) -> int:
        return self.head.out_features


class Extra(Net):
    """A module whose state is more than its tensors, and which reads what it wrote under other names before."""

    def get_extra_state(self) -> Any:
        return {"rate": self.rate}

    def set_extra_state(self, state: Any) -> None:
        self.rate = state["rate"]

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        if (old := f"{prefix}gain") in state:
            state[f"{prefix}scale"] = state.pop(old)
        super()._load_from_state_dict(state, prefix, *args)


#: Modules around a network, plain or tiled.
PARENTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "itself": lambda net: net,
    "in a sequence": lambda net: nn.Sequential(net, nn.ReLU()),
    "deep": lambda net: nn.ModuleDict({"a": nn.ModuleList([nn.Identity(), net])}),
    "in a wrapper": lambda net: nn.Sequential(TiledModule(nn.Sequential(net), tiles=2)),
    "averaged": AveragedModel,
    "twice": lambda net: nn.ModuleList([net, net]),
}


@pytest.mark.parametrize("net", [Net, Extra])
@pytest.mark.parametrize("around", PARENTS)
def test_there_is_one_naming(around: str, net: type[nn.Module]) -> None:
    plain = PARENTS[around](net())
    tiled = PARENTS[around](TiledModule(net(), tiles=2))
    assert list(tiled.state_dict()) == list(plain.state_dict())
    assert tiled.state_dict()._metadata.keys() == plain.state_dict()._metadata.keys()
    for of in ("named_parameters", "named_buffers"):
        assert [n for n, _ in getattr(tiled, of)()] == [n for n, _ in getattr(plain, of)()]
    assert {n for n, _ in tiled.named_modules()} == {n for n, _ in plain.named_modules()}
    for name, module in plain.named_modules():
        assert type(module) in {type(m) for n, m in tiled.named_modules() if n == name}
        assert tiled.get_submodule(name) is not None
    for name, p in tiled.named_parameters():
        assert tiled.get_parameter(name) is p


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("net", [Net, Extra])
@pytest.mark.parametrize("around", PARENTS)
def test_state_goes_in_and_out_between_plain_and_tiled(around: str, net: type[nn.Module], assign: bool) -> None:
    for source, target in [(net(), TiledModule(net(), tiles=2)), (TiledModule(net(), tiles=2), net())]:
        source.rate = 3.0
        one, other = PARENTS[around](source), PARENTS[around](target)
        state = {k: v.clone() if isinstance(v, Tensor) else v for k, v in one.state_dict().items()}
        other.load_state_dict(state, assign=assign)
        for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b, name
        if assign and around != "averaged":  # which has copies
            inner = target.module if isinstance(target, TiledModule) else target
            assert inner.scale is target.scale and any(
                target.scale is v or v is target.scale.data for v in [target.scale]
            )


def test_what_is_missing_and_unexpected_has_the_modules_names() -> None:
    tiled = nn.Sequential(TiledModule(Net(), tiles=2))
    plain = nn.Sequential(Net())
    state = {**plain.state_dict(), "0.other": torch.zeros(1), "0.body.other.x": torch.zeros(1)}
    del state["0.head.weight"]
    assert tiled.load_state_dict(state, strict=False) == plain.load_state_dict(state, strict=False)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0.head.weight"'):
        tiled.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.scale"):
        tiled.load_state_dict({**plain.state_dict(), "0.scale": torch.zeros(2)})


def test_state_of_other_versions_and_hooks_on_state_are_the_modules() -> None:
    tiled, seen = TiledModule(Extra(), tiles=2), list[str]()
    state = tiled.state_dict()
    state["gain"] = state.pop("scale") * 5
    nn.Sequential(tiled).load_state_dict({f"0.{k}": v for k, v in state.items()})
    assert float(tiled.scale) == 5
    tiled.register_state_dict_post_hook(lambda module, state, prefix, meta: seen.append(f"out {prefix}"))
    tiled.register_load_state_dict_pre_hook(lambda module, state, prefix, *rest: seen.append(f"in {prefix}"))
    tiled.register_load_state_dict_post_hook(lambda module, keys: seen.append("read"))
    parent = nn.Sequential(tiled)
    parent.load_state_dict(parent.state_dict())
    assert seen == ["out 0.", "in 0.", "read"]


def test_attributes_are_read_and_set_through_the_wrapper() -> None:
    net = Net()
    tiled = TiledModule(net, tiles=2)
    assert tiled.rate == 1.0 and tiled.classes == 2 and tiled.body is net.body and tiled.scale is net.scale
    torch.testing.assert_close(tiled.features(X), net.features(X))
    tiled.rate, tiled.head, tiled.scale = 2.0, nn.Linear(4, 5), nn.Parameter(torch.full((1,), 3.0))
    tiled.shift = torch.ones(1)
    tiled.register_buffer("late", torch.zeros(1))
    tiled.add_module("last", nn.ReLU())
    assert (net.rate, net.head, net.scale, net.shift) == (2.0, tiled.head, tiled.scale, tiled.shift)
    assert "late" in dict(net.named_buffers()) and net.last is tiled.last
    torch.testing.assert_close(tiled(X), net(X))
    del tiled.late, tiled.last, tiled.rate
    assert not any(hasattr(m, name) for m in (net, tiled) for name in ("late", "last", "rate"))
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'nothing'"):
        tiled.nothing  # noqa: B018
    assert {"features", "head", "plan"} <= set(dir(tiled))


def test_modes_devices_and_types_are_the_modules() -> None:
    net = Net()
    tiled = TiledModule(net, tiles=2)
    parent, seen = nn.Sequential(tiled), list[type]()
    parent.eval()
    assert not net.training and not net.body.training and not tiled.training
    tiled.training = True
    assert net.training and not net.body.training
    parent.double().requires_grad_(False)
    assert net.scale.dtype == net.body[0].weight.dtype == torch.float64 and not net.scale.requires_grad
    parent.apply(lambda m: seen.append(type(m)))
    assert seen.count(Net) == seen.count(nn.Conv2d) == 1
    assert parent.to("meta")[0].head.weight.is_meta and net.scale.is_meta


def test_a_sequence_is_a_sequence() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    tiled = TiledModule(net, tiles=2)
    assert len(tiled) == 3 and tiled[0] is net[0] and list(tiled) == list(net) == list(tiled.children())
    tiled[1] = nn.Tanh()
    del tiled[2]
    tiled.append(nn.Conv2d(4, 1, 1))
    assert [type(m) for m in net] == [nn.Conv2d, nn.Tanh, nn.Conv2d]
    torch.testing.assert_close(tiled(X), net(X))
    assert bool(TiledModule(Net(), tiles=2)) and not hasattr(TiledModule(Net(), tiles=2), "__len__")


COPIES: dict[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m))}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("around", ["itself", "in a sequence"])
def test_a_copy_is_connected_to_its_own_module(how: str, around: str) -> None:
    parent = PARENTS[around](TiledModule(Net().eval(), tiles=2))
    found = COPIES[how](parent)
    tiled = found if around == "itself" else found[0]
    assert tiled.module.scale is tiled.scale is not parent.state_dict(keep_vars=True)[next(
        k for k in parent.state_dict() if k.endswith("scale")
    )]  # fmt: skip
    torch.testing.assert_close(found(X), parent(X))
    tiled.head = nn.Linear(4, 7)
    assert tiled(X).shape == (1, 7)


def test_a_module_pickled_by_1_0_is_read() -> None:
    """1.0 had the module as a child, under the name "module"."""
    net = Net()
    now = TiledModule(net, tiles=2)
    state = {**vars(nn.Module()), "_modules": {"module": net}, "engine": now.engine, "training": False}
    former = TiledModule.__new__(TiledModule)
    former.__setstate__(state)
    assert former.module is net and former.head is net.head and net.training
    torch.testing.assert_close(former(X), net(X))


def test_parameters_are_replaced_by_their_names() -> None:
    tiled = TiledModule(Net().eval(), tiles=2)
    tripled = {name: p * 3 for name, p in tiled.named_parameters()}
    expected = torch.func.functional_call(tiled.module, tripled, X)
    torch.testing.assert_close(torch.func.functional_call(tiled, tripled, X), expected)


EXPORTS: dict[str, Callable[[nn.Module], Any]] = {
    "torch.jit.script": torch.jit.script,
    "torch.jit.trace": lambda net: torch.jit.trace(net, X),
    "torch.export": lambda net: torch.export.export(net, (X,)),
    "torch.fx": torch.fx.symbolic_trace,
    "make_fx": lambda net: make_fx(net)(X),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", EXPORTS)
def test_exports_are_refused_by_name(name: str, inside: bool) -> None:
    tiled = TiledModule(Net().eval(), tiles=2)
    with pytest.raises(RecordingError, match=f"{name}.*tiled.module"):
        EXPORTS[name](nn.Sequential(tiled) if inside else tiled)
    torch.testing.assert_close(tiled(X), tiled.module(X))


@pytest.mark.parametrize("inside", [False, True])
def test_the_refusal_stands_in_the_error_of_a_strict_export(inside: bool) -> None:
    """PyTorch's compiler raises errors of its own type only, with the text of the code's error."""
    tiled = TiledModule(Net().eval(), tiles=2)
    with pytest.raises(RuntimeError, match=r"torch\.export met a TiledModule.*tiled\.module"):
        torch.export.export(nn.Sequential(tiled) if inside else tiled, (X,), strict=True)
    torch.testing.assert_close(tiled(X), tiled.module(X))


@pytest.mark.parametrize("how", [{"tiles": 2}, {"budget": "64MiB"}, {"budget": "110KiB"}])
def test_steps_run_where_hooks_on_saved_tensors_are_disabled(how: dict[str, Any]) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Softplus(), nn.Conv2d(4, 2, 3)).double()
    x = torch.randn(1, 3, 40, 40, dtype=torch.float64)
    net(x).square().mean().backward()
    expected = [p.grad for p in net.parameters()]
    net.zero_grad()
    with torch.autograd.graph.disable_saved_tensors_hooks("disabled by a test"):
        TiledModule(net, **how)(x).square().mean().backward()
        with pytest.raises(RuntimeError, match="disabled by a test"), torch.autograd.graph.save_on_cpu():
            pass
    torch.testing.assert_close([p.grad for p in net.parameters()], expected)
