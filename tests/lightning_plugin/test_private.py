"""What the engine counts on of PyTorch's private names, one by one, and that it uses none beside `private`."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate
from torch.utils.flop_counter import FlopCounterMode

from lightning_plugin import private
from lightning_plugin.errors import RecordingError

PACKAGE = Path(private.__file__).parent
#: Attributes of tensors and operators that are PyTorch's own affair.
ATTRIBUTES = {"_cdata", "_version", "_schema", "_is_view", "_base", "_make_wrapper_subclass", "_make_subclass"}
PRIVATE_MODULE = re.compile(r"torch(\.\w+)*\._(?!_)")


def uses(path: Path) -> list[str]:
    """The private names of PyTorch in a file. Operators may begin as they like."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if node.attr in ATTRIBUTES or (PRIVATE_MODULE.match(name) and not name.startswith("torch.ops.")):
                found.append(name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            found += [f"{node.module}.{a.name}" for a in node.names if PRIVATE_MODULE.match(f"{node.module}.{a.name}")]
        elif isinstance(node, ast.Import):
            found += [a.name for a in node.names if PRIVATE_MODULE.match(a.name)]
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_nothing_private_is_used_elsewhere(path: Path) -> None:
    if path.name != "private.py":
        assert uses(path) == []


def test_private_names_are_found(tmp_path: Path) -> None:
    """The test above can fail."""
    file = tmp_path / "file.py"
    file.write_text("import torch\nfrom torch._C import x\ntorch._C._nn.y()\nt._version\ntorch.ops.aten._softmax\n")
    assert {"torch._C.x", "torch._C._nn.y", "t._version"} <= set(uses(file))
    assert not any("softmax" in name for name in uses(file))


class Recorded(Tensor):
    """A subclass without storage, of which nothing can be called."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise AssertionError(func)

    __torch_dispatch__ = __torch_function__


def test_an_object_becomes_a_result() -> None:
    weight = torch.randn(3, requires_grad=True)
    result, seen = weight.sigmoid(), list[Tensor]()
    result.register_hook(seen.append)
    held = private.without_storage(Recorded, result, True)
    private.become(held, result)
    held.register_hook(seen.append)
    held.retain_grad()
    (held.sum() + result.sum()).backward()
    assert type(held) is type(result) is Tensor and held.grad_fn is not None and not held._is_view()
    assert torch.equal(held, result) and held.data_ptr() == result.data_ptr()
    assert len(seen) == 2 and torch.equal(held.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]

    held, result = private.without_storage(Recorded, result, False), result.detach()
    private.become(held, result)
    held.detach_().mul_(0)
    assert type(held) is Tensor and not held.requires_grad and not result.any()


def test_a_version_counts_writes() -> None:
    x = torch.zeros(3)
    before = private.version(x)
    x.add_(1)
    assert before is not None and private.version(x) == (before[0] + 1, before[1])
    x.data = torch.zeros(3)
    assert private.version(x) != (before[0] + 1, before[1]) and private.write_count(x) == (before[0] + 1, -1)
    with torch.inference_mode():
        assert private.version(torch.zeros(3)) is None


def test_a_storage_has_one_key() -> None:
    x, mode = torch.zeros(4), private.FakeTensorMode()
    assert private.storage_key(x) == private.storage_key(x[1:]) != private.storage_key(x.clone())
    with mode:
        y = torch.zeros(4)
        assert isinstance(y, private.FakeTensor)
        assert private.storage_key(y) == private.storage_key(y.view(2, 2)) != private.storage_key(y + 1)
        with private.without_modes():
            assert not isinstance(torch.zeros(1), private.FakeTensor)


def test_a_mode_made_without_the_compiler_has_what_pytorchs_own_has() -> None:
    ours, theirs = vars(private.Fakes(True)), vars(private.FakeTensorMode(allow_non_fake_inputs=True))
    assert theirs.keys() - ours.keys() <= {"nt_tensor_id_counter", "nt_tensor_id_initial_count"}
    apart = {"fake_tensor_converter", "cache_enabled", "_stack_trace", "_stack"}
    assert {k: v for k, v in theirs.items() if k in ours and k not in apart} == {
        k: v for k, v in ours.items() if k in theirs and k not in apart
    }


def test_work_is_counted_without_hooks_on_the_modules_of_other_threads() -> None:
    """Planning counts; a module that another thread calls meanwhile must not hear of it."""
    x, layer = torch.ones(5, 3), nn.Linear(3, 2)
    with FlopCounterMode(display=False) as theirs:
        layer(x)
    with private.FlopCounter() as ours:
        assert not torch.nn.modules.module._global_forward_pre_hooks
        layer(x)
    assert ours.get_total_flops() == theirs.get_total_flops() > 0


def test_a_method_runs_whether_something_compiles_or_not() -> None:
    assert private.never_compiled(lambda x: x + 1)(1) == 2


def test_a_fake_tensor_is_made_of_a_meta_tensor() -> None:
    mode = private.Fakes(True)
    meta, skin = torch.empty(2, 3, device="meta"), private.FakeMaker(mode, torch.device("cpu"))
    fake = skin.wrap(meta)
    assert isinstance(fake, private.FakeTensor) and fake.device.type == "cpu"
    assert private.storage_key(fake) == private.storage_key(meta)
    assert vars(fake).keys() == vars(private.FakeTensor(mode, meta, torch.device("cpu"))).keys()
    assert mode.on_meta(torch.ops.aten.relu.default, (fake,), {}).is_meta and not fake.is_meta


def test_what_is_asked_instead_of_a_meta_kernel() -> None:
    aten = torch.ops.aten
    assert private.meta_replacement(aten.native_batch_norm.default)[0] is not None
    assert private.meta_replacement(aten.convolution.default)[1] is not None
    assert private.meta_replacement(aten.relu.default) == (None, None)
    assert private.has_meta_kernel(aten.relu.default) and not private.has_meta_kernel(aten.to.dtype)
    assert private.is_composite(aten.to.dtype) and not private.is_composite(aten.relu.default)


def test_a_fake_tensors_device_is_asked_for_by_an_operator() -> None:
    seen = []

    class Ear(private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with private.Fakes(True), Ear():
        torch.ops.prim.device.default(torch.zeros(1))
    assert private.DEVICE_OF in seen


def test_what_needs_data_says_so() -> None:
    with private.FakeTensorMode():
        x = torch.zeros(4)
        for call in (x.nonzero, x.sum().item):
            with pytest.raises(private.NEEDS_DATA):
                call()


def test_a_view_is_known() -> None:
    x = torch.zeros(4)
    assert private.without_view(x) is x and not private.without_view(x.view(2, 2))._is_view()


def test_a_tensor_without_storage_has_all_else() -> None:
    class Ours(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            raise AssertionError

    like = torch.zeros(2, 6, dtype=torch.float64)[:, ::2]
    x = private.without_storage(Ours, like, True)
    assert isinstance(x, Ours) and x.requires_grad
    assert (x.shape, x.stride(), x.dtype) == (like.shape, like.stride(), like.dtype)


def test_a_tensor_answers_as_it_is() -> None:
    class Ours(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return "ours"

    x = torch.zeros(3).as_subclass(Ours)
    assert x + 1 == "ours"
    with private.without_torch_function():
        assert torch.equal(torch.Tensor.add(x, 1), torch.ones(3))


def test_an_operator_says_its_name_and_arguments() -> None:
    assert private.operator_name(torch.ops.aten.relu_.default) == "relu_"
    assert private.schema(torch.ops.aten.relu_.default).is_mutable and private.schema(torch.relu) is None


def test_the_arguments_of_to() -> None:
    device, dtype, blocking, layout = private.parse_to("cpu", torch.float64, True, memory_format=torch.channels_last)
    assert (device, dtype, blocking, layout) == (torch.device("cpu"), torch.float64, True, torch.channels_last)
    assert private.parse_to(torch.int8)[:2] == (None, torch.int8)


def test_former_arguments_of_losses() -> None:
    assert [private.legacy_reduction(*a) for a in ((None, False), (False, None), (True, True))] == [
        "none",
        "sum",
        "mean",
    ]


def test_a_pass_has_a_number_and_knows_what_it_runs() -> None:
    seen = []
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    a, b = x * 2, y * 3

    def look(gradient: Tensor) -> None:
        seen.append((private.current_pass(), private.retains_graph(), private.is_scheduled(b.grad_fn)))

    a.register_hook(look)
    assert private.current_pass() == -1
    torch.autograd.grad((a + b).sum(), [x, y], retain_graph=True)
    torch.autograd.grad((a + b).sum(), [x])
    (first, kept, ran), (second, gone, left) = seen
    assert first != second and (kept, ran) == (True, True) and (gone, left) == (False, False)


def test_a_checkpointed_block_is_known_while_it_runs() -> None:
    seen = []

    def block(x: Tensor) -> Tensor:
        seen.append(private.checkpoint_block())
        return x.exp()

    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        checkpoint(block, x, use_reentrant=False)
    with torch.autograd.graph.save_on_cpu():
        block(x)
    block(x)
    first, second, *others = seen
    assert first is not None and second is not None and first != second and others == [None, None]


def test_batches_are_made_by_the_more_special_class() -> None:
    class Ours(Tensor):
        pass

    private.collate_by(Ours, lambda batch, collate_fn_map=None: "ours")
    assert default_collate([torch.zeros(1).as_subclass(Ours)]) == "ours"
    assert torch.equal(default_collate([torch.zeros(1), torch.ones(1)]), torch.tensor([[0.0], [1.0]]))


def test_the_step_below_hooks_and_wrappers(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, calls = torch.optim.SGD([nn.Parameter(torch.zeros(1))]), []
    whole = torch.optim.SGD.step

    @functools.wraps(whole)
    def counted(self: torch.optim.SGD, *args: object) -> object:
        calls.append(1)
        return whole(self, *args)

    assert not private.has_step_hooks(optimizer) and all(
        map(private.is_defined_in_torch, private.step_wrappers(torch.optim.SGD))
    )
    monkeypatch.setattr(torch.optim.SGD, "step", counted)
    hook = register_optimizer_step_pre_hook(lambda *a: calls.append(2))
    try:
        assert private.has_step_hooks(optimizer)
        optimizer.step()
        assert calls == [1, 2]
        outer, *_, inner = private.step_wrappers(torch.optim.SGD)
        assert not private.is_defined_in_torch(outer) and private.is_defined_in_torch(inner)
        inner(optimizer)
        assert calls == [1, 2]
    finally:
        hook.remove()


def test_the_innermost_mode_is_known() -> None:
    class Mode(private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    with Mode() as outer, Mode() as inner:
        assert private.dispatch_mode() is inner is not outer


def test_families_of_layers() -> None:
    assert issubclass(nn.SyncBatchNorm, private.BatchNormBase) and issubclass(nn.BatchNorm1d, private.BatchNormBase)
    assert issubclass(nn.InstanceNorm2d, private.InstanceNormBase) and issubclass(nn.AlphaDropout, private.DropoutBase)


@pytest.mark.slow
def test_the_compiler_is_not_imported() -> None:
    """Importing the engine takes no compiler along, nor do fake tensors, and changes nothing of PyTorch's own."""
    script = (
        "import sys, torch\n"
        "import lightning_plugin\n"
        "from lightning_plugin.private import has_compiler\n"
        "assert not has_compiler()\n"
        "from lightning_plugin.fakes import MODES\n"
        "with MODES.planning: torch.conv2d(torch.zeros(1, 3, 8, 8), torch.zeros(4, 3, 3, 3)).relu_()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


class Pair(NamedTuple):
    left: Any
    right: Any


#: Prints the names of PyTorch's and of Python's that importing the engine changes.
IMPORTS = """
import logging, os, sys, warnings
import torch, torch.utils.data, torch.utils._pytree
from torch.utils.data._utils.collate import default_collate_fn_map

def state():
    kinds = (
        torch, torch.nn, torch.nn.functional, torch.Tensor, torch.nn.Module, torch.nn.Parameter,
        torch.autograd.Function, torch.optim.Optimizer, torch.utils.data.DataLoader,
    )
    found = {f"{kind.__name__}.{name}": thing for kind in kinds for name, thing in vars(kind).items()}
    return found | {
        "batches": dict(default_collate_fn_map), "trees": set(torch.utils._pytree.SUPPORTED_NODES),
        "finders": list(sys.meta_path), "handlers": list(logging.root.handlers), "filters": list(warnings.filters),
        "environment": dict(os.environ), "threads": torch.get_num_threads(), "dtype": torch.get_default_dtype(),
        "random": torch.get_rng_state().tolist(), "lightning": {"lightning", "pytorch_lightning"} & set(sys.modules),
    }

before = state()
import lightning_plugin
after = state()
print(*(k for k in after if k not in before or (after[k] is not before[k] and after[k] != before[k])))
"""


@pytest.mark.slow
def test_importing_changes_nothing_that_a_constructor_could() -> None:
    """Lightning may be imported before anything is constructed, with registries that the strategies' names go into."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["finders"]


def test_trees_are_those_of_pytorch() -> None:
    """Also of what is registered, named tuples, and results of operators."""
    most = torch.max(torch.eye(2), 1)
    tree = {"a": [1, (2, Pair(3, {"b": None}))], "c": OrderedDict(d=(4,)), "e": most, "f": torch.Size([5]), "g": {6}}

    expected, found = torch.utils._pytree.tree_leaves(tree), private.tree_leaves(tree)
    assert len(found) == len(expected) and all(a is b for a, b in zip(found, expected, strict=True))
    changed = private.tree_map(lambda t: ("was", id(t)), tree)
    assert changed == torch.utils._pytree.tree_map(lambda t: ("was", id(t)), tree)
    assert type(changed["c"]) is OrderedDict and type(changed["e"]) is type(most)


def test_adding_to_each_of_some_tensors() -> None:
    """In place, to the bit what one addition after the other gives, types as they are."""
    totals = [torch.randn(5, dtype=torch.float64), torch.randn(2, 3), torch.randn(4, 4).t()]
    others = [torch.randn(5), torch.randn(3).expand(2, 3), torch.randn(4, 4)]
    expected = [total.clone().add_(other, alpha=3) for total, other in zip(totals, others, strict=True)]
    private.add_each(totals, others, 3)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(totals, expected, strict=True))


def test_operators_of_torch_ops() -> None:
    assert isinstance(torch.ops.aten.add.Tensor, private.OPERATORS)
    assert isinstance(torch.ops.aten.add, private.OPERATORS)
    assert not isinstance(torch.add, private.OPERATORS)


def test_a_tensor_answers_calls_of_custom_functions() -> None:
    class Answers(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return private.custom_function(func), args[1:], kwargs

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, n: int) -> torch.Tensor:
            return x * n

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            return g * 5, None

    x = torch.ones(2, requires_grad=True)
    Twice.apply(x, 2).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [5, 5]
    assert Twice.apply == Twice.apply and private.custom_function(torch.add) is None
    kept = Twice.apply
    private.override_functions(Answers)
    try:
        for apply in (Twice.apply, kept):
            assert apply(x.detach().as_subclass(Answers), 2) == (Twice, (2,), {})
    finally:
        private._overriding.remove(Answers)


def test_transformations_are_known() -> None:
    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            private.refuse_batched([None, g])
            return g

    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RecordingError, match="batched gradients"):
        torch.autograd.grad(Looks.apply(x), x, torch.eye(2), is_grads_batched=True)
    torch.autograd.grad(Looks.apply(x).sum(), x)
    private.refuse_transforms()
    with pytest.raises(RecordingError, match=r"torch\.func"):
        torch.func.grad(lambda z: (private.refuse_transforms(), z.sum())[1])(torch.ones(2))
    private.refuse_transforms(x)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RecordingError, match="forward_ad"):
        private.refuse_transforms(private.make_dual(torch.ones(2), torch.ones(2), 0))


def test_aliases_of_a_moved_tensor_have_its_version() -> None:
    x = torch.nn.Parameter(torch.randn(3))
    before = private.version(x)
    private.move_storage(x, x.detach().clone())
    assert private.version(x) == private.version(x.detach()) == before
    private.move_storage(x, x.detach().clone())
    assert private.version(x) == private.version(x.detach()) == before
    x.data = x.detach().clone()  # the user's
    assert private.version(x) != before


def test_calls_below_autograd_make_no_graph() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2)
    with private.below_autograd():
        assert (x * 2).grad_fn is None
        y.add_(1)
    assert torch.equal(private.direct(torch.ops.aten.add.Tensor)(x, y), torch.tensor([3.0, 3.0]))


def test_dispatch_modes_are_told_of_tensors_that_they_did_not_see() -> None:
    class Mode(private.TorchDispatchMode):
        told: tuple[Tensor, ...] = ()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

        def add_constants(self, tensors: Any) -> None:
            self.told = tuple(tensors)

    x, outer, inner = torch.ones(2), Mode(), Mode()
    with outer, inner:
        assert private.dispatch_modes() == [outer, inner]
        private.declare_constants([x])
    assert outer.told == inner.told == (x,)
    assert private.dispatch_modes() == []


def test_settings_and_autocast_are_those_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    before = private.settings()
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", not torch.backends.mkldnn.enabled)
    assert private.settings() != before
    with torch.autocast("cpu", torch.bfloat16), private.without_autocast("cpu"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    assert not isinstance(private.without_autocast("cpu"), torch.autocast)
