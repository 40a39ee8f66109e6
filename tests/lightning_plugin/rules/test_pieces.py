"""Keys and values that are read piece by piece give what keys and values give that lie there whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_plugin import LazyImage, TiledModule, make_plan, materialize
from lightning_plugin.errors import PlanError
from lightning_plugin.plan import Plan
from tests.exactness import TOLERANCE, assert_exact, difference
from tests.lightning_plugin.networks import AnyPlan
from tests.lightning_plugin.rules.helpers import After

Form = Callable[..., Tensor]


def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def scaled_and_causal(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.4)


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """A bias that is learnt, one for each head and pair of positions."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def blind(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Some queries may look at nothing, and some not at the first pieces."""
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu()
    mask[3] = mask[7] = False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def grouped(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """One key serves two queries."""
    return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)


def same(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Keys that are values too."""
    return F.scaled_dot_product_attention(q, k, k)


def by_hand(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, -1) @ v


def by_hand_with_a_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (torch.matmul(q, k.transpose(-2, -1)) * 0.6 + bias[0]).softmax(-1) @ v


class Attends(nn.Module):
    """Tokens of an image that look at each other."""

    def __init__(self, form: Form, tokens: int) -> None:
        super().__init__()
        self.form = form
        self.embed, self.qkv, self.out = nn.Conv2d(3, 8, 1), nn.Linear(8, 24), nn.Linear(8, 2)
        self.bias = nn.Parameter(torch.randn(2, tokens, tokens))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        found: Tensor = self.out(self.form(q, k, v, self.bias).transpose(1, 2).flatten(2)).tanh().mean(1)
        return found


@pytest.mark.parametrize("form", [plain, scaled_and_causal, biased, blind, grouped, same, by_hand, by_hand_with_a_bias])
@pytest.mark.parametrize("pieces", [2, 5])
def test_pieces_are_exact(form: Form, pieces: int) -> None:
    plan = AnyPlan(grids=((3, 2, 1),), pieces=pieces, spilled=frozenset({1}))
    assert_exact(Attends(form, 35), (1, 3, 7, 5), engine=plan)
    assert plan.streams


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types_err_as_plain_does(dtype: torch.dtype) -> None:
    """Half a dozen times what the same network errs whose keys lie there whole, at most."""
    torch.manual_seed(0)
    net = Attends(plain, 35)
    x = torch.randn(1, 3, 7, 5)

    def gradients(dtype: torch.dtype, image: Callable[[Tensor], Tensor]) -> list[Tensor]:
        one = copy.deepcopy(net).to(dtype)
        one(image(x.to(dtype))).float().square().sum().backward()
        return [p.grad.double() for p in one.parameters() if p.grad is not None]

    true = gradients(torch.float64, lambda x: x)
    theirs = gradients(dtype, lambda x: x)
    mine = gradients(dtype, lambda x: LazyImage.from_tensor(x, engine=AnyPlan(grids=((3, 2, 1),), pieces=4)))
    floor = 1e-3 * max(float(t.abs().max()) for t in true)
    worst = max(difference(a, b, floor) for a, b in zip(theirs, true, strict=True))
    assert all(difference(a, b, floor) < 6 * worst for a, b in zip(mine, true, strict=True))


def test_dropout_draws_the_same_numbers() -> None:
    """A weight is dropped for where it is, however keys are cut."""

    class Dropped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            t = x.flatten(2).transpose(1, 2)
            return F.scaled_dot_product_attention(t, t * 2, t + 1, dropout_p=0.4)

    x = torch.randn(1, 3, 7, 5, dtype=torch.float64)
    found = []
    for pieces in (1, 2, 6):
        torch.manual_seed(3)
        image = x.clone().requires_grad_()
        out = Dropped()(LazyImage.from_tensor(image, engine=AnyPlan(grids=((2, 2, 1),), pieces=pieces)))
        out.square().sum().backward()
        found.append((out.detach() + 0, image.grad))
    for outcome in found[1:]:
        assert all(difference(a, b) < TOLERANCE for a, b in zip(outcome, found[0], strict=True))


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_query_by_hand_that_may_look_at_nothing_is_no_number(pieces: int) -> None:
    """As in plain PyTorch, whose fused attention gives zeros there."""
    mask = torch.zeros(35, 35, dtype=torch.float64)
    mask[4] = -torch.inf

    def attend(x: Tensor) -> Tensor:
        t = x.flatten(2).transpose(1, 2)
        return torch.softmax(t @ (t * 2).transpose(1, 2) + mask, -1) @ t

    x = torch.randn(1, 3, 7, 5, dtype=torch.float64)
    expected = attend(x)
    found = attend(LazyImage.from_tensor(x, engine=AnyPlan(grids=((2, 2, 1),), pieces=pieces))) + 0
    assert torch.equal(materialize(found).isnan(), expected.isnan())
    assert difference(materialize(found).nan_to_num(), expected.nan_to_num()) < TOLERANCE


@pytest.mark.parametrize(
    "form",
    [
        lambda s, v: (s.softmax(-1) @ v, s.softmax(-1).sum(-1)),
        lambda s, v: (s.softmax(-2) @ v,),
        lambda s, v: ((s + s.softmax(-1)).softmax(-1) @ v,),
        lambda s, v: ((s.softmax(-1) * 2) @ v,),
        lambda s, v: ((3 + s).softmax(-1) @ v,),
        lambda s, v: ((v @ torch.linspace(-1, 1, 140, dtype=v.dtype).view(4, 35)).softmax(-1) @ v,),
        lambda s, v: (s.softmax(-1) @ torch.linspace(-1, 1, 140, dtype=v.dtype).view(35, 4),),
    ],
    ids=["weights are read too", "over queries", "of a sum", "scaled weights", "shifted", "keys", "values"],
)
def test_what_is_nearly_attention_is_what_it_is(form: Callable[[Tensor, Tensor], tuple[Tensor, ...]]) -> None:
    def attend(x: Tensor) -> tuple[Tensor, ...]:
        t = x.flatten(2).transpose(1, 2)
        return form(t @ (t * 2).transpose(1, 2), t)

    assert_exact(After(attend), (1, 3, 7, 5), tiles=(3, 2), backward_tiles=(2, 3))


class Tokens(nn.Module):
    """Bags of patches; the features of each look at each other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Linear(12, width), nn.Linear(width, 3 * width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x.flatten(-3)))
        x = x if x.dim() == 3 else x[None]
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        found: Tensor = self.head(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).mean(1))
        return found


@pytest.mark.parametrize("bags", [(), pytest.param((3,), marks=pytest.mark.full)])
def test_a_budget_that_keys_do_not_fit_is_kept(bags: tuple[int, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = Tokens(16).double(), torch.randn(*bags, 503, 3, 2, 2, dtype=torch.float64)
    keys = 2 * 503 * 16 * 8
    other = copy.deepcopy(net)
    net(x).square().sum().backward()
    tiled = TiledModule(other, budget=3 * keys // 4, disk=str(tmp_path))
    tiled(LazyImage(x)).square().sum().backward()
    assert any(s.pieces > 1 for s in tiled.plan.segments)
    assert tiled.peak_bytes <= tiled.plan.peak_bytes <= 3 * keys // 4
    floor = 1e-3 * max(float(p.grad.abs().max()) for p in net.parameters())  # type: ignore[union-attr]
    for mine, theirs in zip(other.parameters(), net.parameters(), strict=True):
        assert difference(mine.grad, theirs.grad, floor) < TOLERANCE  # type: ignore[arg-type]


def test_keys_that_fit_are_not_cut(tmp_path: Path) -> None:
    plan = make_plan(Tokens(16), (1009, 3, 2, 2), budget="1MiB", disk=str(tmp_path))
    assert all(s.pieces == 1 for s in plan.segments)


def test_a_plan_says_so_and_is_checked(tmp_path: Path) -> None:
    plan = make_plan(Tokens(16), (1009, 3, 2, 2), budget="48KiB", disk=str(tmp_path))
    cut = [s.pieces for s in plan.segments if s.pieces > 1]
    assert cut and f"keys in {cut[0]} pieces" in str(plan)
    assert Plan.from_json(plan.to_json()) == plan
    tiled = TiledModule(nn.Conv2d(3, 2, 1), plan=Plan.from_json(others(plan)))
    with pytest.raises(PlanError, match="reads none that it can cut"):
        tiled(LazyImage(torch.randn(1, 3, 4, 4))).sum().backward()


def others(plan: Plan) -> str:
    """A plan of another network, in whose segment keys are cut that it does not have."""
    made = make_plan(nn.Conv2d(3, 2, 1), (1, 3, 4, 4), budget="1GiB")
    text = made.to_json()
    assert '"keep": true' in text and '"pieces": 1' in text
    return text.replace('"keep": true', '"keep": false').replace('"pieces": 1', '"pieces": 2')
