"""Attention in the corners that random networks do not reach."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_plugin import LazyImage, make_plan, materialize
from tests.exactness import asked, assert_exact
from tests.lightning_plugin.bags import Attention
from tests.lightning_plugin.rules.helpers import After, assert_tiled, recorded_kinds


def tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


def causal_and_blind(x: Tensor) -> Tensor:
    """Some queries may look at nothing: they find zeros, and give no gradient."""
    t = tokens(x)
    mask = torch.ones(t.shape[1], t.shape[1], dtype=torch.bool).tril()
    mask[3] = mask[7] = False
    return F.scaled_dot_product_attention(t, t * 2, t - 1, attn_mask=mask)


def grouped(x: Tensor) -> Tensor:
    """Two keys and values serve four queries."""
    t = tokens(x)
    n, length, c = t.shape
    query = t.unsqueeze(1).expand(n, 4, length, c) * torch.arange(1.0, 5.0, dtype=t.dtype).view(1, 4, 1, 1)
    pair = t.unsqueeze(1).expand(n, 2, length, c) * torch.arange(1.0, 3.0, dtype=t.dtype).view(1, 2, 1, 1)
    return F.scaled_dot_product_attention(query, pair, pair, enable_gqa=True)


def scaled(x: Tensor) -> Tensor:
    t = tokens(x)
    return F.scaled_dot_product_attention(t, t, t, scale=0.37, is_causal=True)


def biased_by_hand(x: Tensor) -> Tensor:
    t = tokens(x)
    far = (torch.arange(t.shape[1])[:, None] - torch.arange(t.shape[1])[None]).abs().to(t.dtype)
    return torch.softmax(torch.baddbmm(-far, t, t.transpose(1, 2), beta=0.3, alpha=0.7), -1) @ t


def values_of_the_user(x: Tensor) -> Tensor:
    """Attention to what is no map, and what looks like it."""
    t = tokens(x)
    values = torch.linspace(-1, 1, t.shape[1], dtype=t.dtype).view(1, -1, 1).expand(t.shape[0], -1, 3)
    return torch.softmax(torch.bmm(t, t.transpose(1, 2)), -1) @ values


def keys_of_the_user(x: Tensor) -> Tensor:
    t = tokens(x)
    keys = torch.linspace(-1, 1, 4 * t.shape[1], dtype=t.dtype).view(1, 4, -1).expand(t.shape[0], -1, -1)
    return torch.softmax(torch.bmm(t, keys), -1) @ t


@pytest.mark.parametrize(
    "function", [causal_and_blind, grouped, scaled, biased_by_hand, values_of_the_user, keys_of_the_user]
)
@pytest.mark.parametrize("images", [1, 3])
def test_exact_and_no_barrier(function, images):
    net = After(function)
    assert_exact(net, (images, 3, 7, 5), tiles=(3, 2, 2), backward_tiles=(2, 3))
    assert not recorded_kinds(net, (images, 3, 7, 5))["Barrier"]


class Dropped(nn.Module):
    """Attention whose values are all one: what comes out is the share of weights that were kept."""

    def forward(self, x: Tensor) -> Tensor:
        t = tokens(x)
        return F.scaled_dot_product_attention(t, t, torch.ones_like(t), dropout_p=0.25)


def test_dropout_keeps_its_share_and_does_not_depend_on_tiles():
    torch.manual_seed(3)
    x = torch.randn(2, 3, 24, 20, dtype=torch.float64)
    found = []
    for tiles in ((1, 1), (5, 3, 2)):
        torch.manual_seed(7)
        found.append(materialize(Dropped()(LazyImage.from_tensor(x, engine=asked(tiles)))))
    assert torch.allclose(found[0], found[1], atol=1e-12)
    assert abs(found[0].mean().item() - 1) < 0.02 and found[0].std() > 0.01


def test_a_step_over_many_tokens_is_planned_below_plain():
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Conv2d(3, 16, 4, 4)
            self.layer = Attention("by hand", 16, 2, False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(tokens(self.embed(x))).mean(1)

    plan = make_plan(Tokens(), (1, 3, 192, 160), budget="16MiB", disk=False)
    assert not plan.barriers
    assert plan.peak_bytes < 16 * 2**20 < plan.forecast.plain_bytes


def beside_the_map(x: Tensor, w: Tensor) -> Tensor:
    """Attention over a whole map within a residual branch: rows and columns are those of the map."""
    t = tokens(x)
    return x + F.scaled_dot_product_attention(t, t * 2, t @ w).transpose(1, 2).view_as(x)


def test_attention_in_a_residual_branch_is_tiled() -> None:
    assert_tiled(After(beside_the_map, w=(4, 4)), (1, 3, 9, 7), tiles=(3, 2), backward_tiles=(2, 3))
