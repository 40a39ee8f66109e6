"""Operators that reduce or contract space: attention pooling and its kin, in every spelling."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_plugin import LazyImage, materialize
from tests.exactness import TOLERANCE, asked, assert_exact, difference
from tests.lightning_plugin.rules.helpers import After, assert_tiled, recorded_kinds
from tests.sampling import sampled

SHAPES = [(2, 3, 11, 7), (1, 3, 5, 13), (3, 3, 1, 9)]
GRIDS = [((3, 2), (2, 3)), ((1, 1), (4, 3)), ((5, 7), (1, 2))]


def bag(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


def weighted(x: Tensor, w: Tensor) -> Tensor:
    a = F.softmax(bag(x) @ w, dim=1)
    return torch.bmm(a.transpose(1, 2), bag(x))


def weighted_einsum(x: Tensor, w: Tensor) -> Tensor:
    a = torch.softmax(torch.einsum("nchw,ck->nkhw", x, w).flatten(2), -1)
    return torch.einsum("nkp,npc->nkc", a, bag(x))


def weighted_sum(x: Tensor, w: Tensor) -> Tensor:
    a = F.conv2d(x, w.t()[:1, :, None, None])
    a = F.softmax(a.flatten(2), dim=-1).view_as(a)
    return (a * x).sum((2, 3))


def weighted_map_einsum(x: Tensor, w: Tensor) -> Tensor:
    a = torch.einsum("nchw,ck->nkhw", x, w)
    a = a.flatten(2).softmax(2).reshape(a.shape)
    return torch.einsum("nkhw,nchw->nkc", a, x)


def first_of_batch(x: Tensor, w: Tensor) -> Tensor:
    """A bag without a batch dimension, as CLAM has it."""
    h = x[0].flatten(1).t()
    a = torch.transpose(torch.tanh(h @ w), 1, 0)
    return torch.mm(F.softmax(a, dim=1), h)


def baddbmm(x: Tensor, w: Tensor) -> Tensor:
    a = (bag(x) @ w).softmax(1).transpose(1, 2)
    return torch.baddbmm(w.t()[None], a, bag(x), beta=0.5, alpha=2.0)


def vector_products(x: Tensor, w: Tensor) -> Tensor:
    scores = x[0].flatten(1).t() @ w[:, 0]
    return torch.mv(x[0].flatten(1), scores.softmax(0)) * torch.dot(scores, scores)


def multihead(x: Tensor, w: Tensor) -> Tensor:
    """Learned queries, two heads: `nn.MultiheadAttention` as it multiplies."""
    h = bag(x)
    n, p, c = h.shape
    k = h.reshape(n, p, 2, c // 2).permute(0, 2, 1, 3)
    q = w.t().reshape(1, 2, 2, c // 2).permute(0, 2, 1, 3).expand(n, -1, -1, -1)
    return torch.matmul((q @ k.transpose(-2, -1)).softmax(-1), k)


def pooled_attention(x: Tensor, w: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(w.t().expand(len(x), -1, -1), bag(x), bag(x))


def few_keys(x: Tensor, w: Tensor) -> Tensor:
    keys = w.t().expand(len(x), -1, -1)
    return F.scaled_dot_product_attention(bag(x), keys, keys)


class Perceiver(nn.Module):
    """Learned queries that look at the bag through `nn.MultiheadAttention`."""

    def __init__(self, need_weights: bool):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.query = nn.Parameter(torch.randn(1, 3, 4))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        h = bag(self.conv(x))
        return self.attention(self.query.expand(len(x), -1, -1), h, h, need_weights=self.need_weights)[0]


@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention_with_learned_queries(need_weights):
    assert_tiled(Perceiver(need_weights), (2, 3, 9, 11))


def best_features(x: Tensor, k: int) -> Tensor:
    h = bag(x)
    where = h[..., 0].topk(k, dim=1)[1]
    return torch.gather(h, 1, where.unsqueeze(-1).expand(-1, -1, h.shape[-1]))


POOLS = [
    weighted,
    weighted_einsum,
    weighted_sum,
    weighted_map_einsum,
    first_of_batch,
    baddbmm,
    vector_products,
    multihead,
    pooled_attention,
    few_keys,
]


@pytest.mark.parametrize("pool", POOLS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(("shape", "grids"), list(zip(SHAPES, GRIDS, strict=True)))
def test_attention_pooling_is_tiled_and_exact(pool, shape, grids):
    assert_tiled(After(pool, w=(4, 2)), shape, tiles=grids[0], backward_tiles=grids[1])


PRODUCTS = {
    "gram": lambda x: x.flatten(2) @ bag(x),
    "gram einsum": lambda x: torch.einsum("nchw,ndhw->ncd", x, x),
    "fully connected": lambda x, w: F.linear(
        x.flatten(1), w.expand(-1, -1, x.shape[2] * x.shape[3]).flatten(1), w[:, 0, 0]
    ),
    "linear on rows": lambda x, w: F.linear(bag(x).reshape(-1, 4), w[:, :, 0]),
    "channels last": lambda x, w: x.permute(0, 2, 3, 1) @ w[:, :, 0].t(),
    "matrix from the left": lambda x, w: w[:, :, 0] @ x.flatten(2),
    "a matrix for each position": lambda x: (
        x[0].flatten(1).t().unsqueeze(1)
        @ torch.linspace(-1, 1, x.shape[2] * x.shape[3] * 8, dtype=x.dtype).view(-1, 4, 2)
    ),
    "one matrix for all positions": lambda x, w: torch.bmm(
        x[0].flatten(1).t().unsqueeze(1),
        w[None, :, :, 0].transpose(1, 2).expand(x.shape[2] * x.shape[3], -1, -1),
    ),
    "tensordot": lambda x, w: torch.tensordot(x, w[:, :, 0], dims=([1], [1])),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_matrix_products(name, shape):
    parameters = {} if name.startswith(("gram", "a matrix")) else {"w": (3, 4, 1)}
    assert_tiled(After(PRODUCTS[name], **parameters), shape, joins=name == "fully connected" and shape[0] > 1)


def response(x: Tensor) -> Tensor:
    return x.norm(p=2, dim=(2, 3), keepdim=True)


def expected_column(x: Tensor) -> Tensor:
    """Spatial softmax: where the attention lies on average."""
    return (x.flatten(2).softmax(-1).view_as(x).sum(2) * torch.arange(x.shape[3])).sum(-1)


REDUCTIONS = {
    "mean 2 3": lambda x: x.mean([2, 3]),
    "mean twice": lambda x: x.mean(-1).mean(-1),
    "sum rows": lambda x: x.sum(3, keepdim=True),
    "amax columns": lambda x: x.relu().amax(2),
    "amin rows": lambda x: x.amin(3, keepdim=True),
    "var rows": lambda x: x.var(3),
    "std columns": lambda x: x.std((1, 3), keepdim=True),
    "lse columns": lambda x: x.logsumexp(2),
    "norm rows": lambda x: x.norm(dim=3),
    "batch and rows": lambda x: x.mean((0, 3)),
    "gate by rows": lambda x: x * x.mean(3, keepdim=True).sigmoid() * x.amax(2, keepdim=True),
    "flat sum": lambda x: x.flatten(1).sum(1),
    "amax": lambda x: x.amax((2, 3)),
    "avg_pool of all": lambda x: F.avg_pool2d(x, x.shape[2:]).flatten(1),
    "generalised mean by avg_pool": lambda x: F.avg_pool2d(x.clamp(min=0.1).pow(3), list(x.shape[2:])).pow(1 / 3),
    "largest norm": lambda x: torch.linalg.vector_norm(x, float("inf"), dim=(2, 3)),
    "count norm": lambda x: x.mean((2, 3)) + torch.linalg.vector_norm(x.relu(), 0, dim=(2, 3)),
    "nansum": lambda x: torch.nansum(x, (2, 3)),
    "nanmean": lambda x: torch.nanmean(x, (1, 2, 3)),
    "aminmax": lambda x: torch.cat([t.view(1) for t in torch.aminmax(x)]),
    "std_mean": lambda x: torch.cat(torch.std_mean(x, (2, 3))),
    "var_mean": lambda x: torch.cat(torch.var_mean(x, (2, 3), keepdim=True)),
    "var_mean by default": lambda x: torch.cat(torch.var_mean(x, (2, 3), correction=None)),
    "smallest norm": lambda x: torch.linalg.vector_norm(x.abs() + 1, -float("inf"), dim=(2, 3), keepdim=True),
    "mean in another type": lambda x: x.float().mean((2, 3), dtype=torch.float64) * 0 + x.mean((2, 3)),
    "max flat": lambda x: torch.max(x.flatten(2), 2)[0],
    "generalised mean": lambda x: x.clamp(min=1e-6).pow(3).mean((2, 3)).pow(1 / 3),
    "log-sum-exp": lambda x: (x.flatten(2) * 4).logsumexp(-1) / 4,
    "std": lambda x: x.flatten(2).std(2),
    "normalize channels": lambda x: F.normalize(x, dim=1),
    "normalize space": lambda x: F.normalize(x.flatten(2), dim=2),
    "normalize pooled": lambda x: F.normalize(x.mean((2, 3))),
    "mean of all": lambda x: x.mean(),
    "batch and space": lambda x: (x - x.mean((0, 2, 3), True)) / (x.var((0, 2, 3), keepdim=True) + 1e-5).sqrt(),
    "frn": lambda x: F.leaky_relu(x * (x.pow(2).mean((2, 3), keepdim=True) + 1e-6).rsqrt()),
    "grn": lambda x: x * response(x) / (response(x).mean(1, keepdim=True) + 1e-6),
    "squeeze-excite": lambda x: x * x.mean((2, 3)).tanh().view(*x.shape[:2], 1, 1),
    "flatten after pool": lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1),
    "softmax of all": lambda x: x.flatten(1).softmax(1).view_as(x).square(),
    "log-softmax": lambda x: x.flatten(2).log_softmax(-1) * 0.1,
    "spatial softmax coordinates": expected_column,
}


@pytest.mark.parametrize(("name", "shape"), sampled(REDUCTIONS, [(2, 3, 11, 7), (2, 3, 4, 13)], every=2))
def test_reductions(name, shape):
    assert_tiled(After(REDUCTIONS[name]), shape)


ALONG_AN_AXIS = {
    "softmax of rows": lambda x: x.softmax(-1) * x,
    "running sum": lambda x: x.cumsum(2),
    "running products": lambda x: (x * 0.1 + 1).cumprod(3),
}


@pytest.mark.parametrize("name", ALONG_AN_AXIS)
@pytest.mark.parametrize("grids", GRIDS)
def test_along_one_axis(name, grids):
    net = nn.Sequential(After(ALONG_AN_AXIS[name]), nn.Conv2d(4, 2, 3, padding=1))
    assert_tiled(net, (2, 3, 9, 11), tiles=grids[0], backward_tiles=grids[1])


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("name", ["mean", "amax", "prod", "std"])
def test_depth_of_a_volume_projects_to_a_map(name, keep):
    net = After(lambda x: getattr(x, name)(dim=2, keepdim=keep), axes=3)
    assert_tiled(net, (2, 3, 5, 6, 7), tiles=(2, 3, 2), backward_tiles=(2, 1, 3))
    after = nn.Sequential(After(lambda x: x.amax(2), axes=3), nn.Conv2d(4, 2, 3, stride=2))
    assert_tiled(after, (2, 3, 5, 8, 9), tiles=(1, 3, 2), backward_tiles=(1, 2, 2))


def test_masked_positions_have_no_weight():
    """A tile whose scores are all -inf, and a bag of which nothing is left."""
    x = torch.randn(2, 4, 8, 6, dtype=torch.float64, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    mask = torch.zeros(2, 1, 8, 6)
    mask[:, :, :4] = -math.inf

    def pool(x: Tensor) -> Tensor:
        a = (x[:, :1] + mask).flatten(2).softmax(-1)
        return (a @ x.flatten(2).transpose(1, 2)).sum()

    pool(x).backward()
    pool(LazyImage.from_tensor(twin, engine=asked((4, 2), (2, 3)))).backward()
    assert difference(twin.grad, x.grad) < TOLERANCE
    gone = LazyImage.from_tensor(torch.full((1, 1, 4, 4), -math.inf), engine=asked((2, 2), (2, 2)))
    assert materialize(gone.flatten(1).softmax(1)).isnan().all()


def test_softmax_is_as_precise_as_plain_in_float32_at_large_scores():
    x = (torch.randn(1, 1, 64, 64, dtype=torch.float64) + 5000).float()
    lazy = LazyImage.from_tensor(x, engine=asked((4, 4), (4, 4)))
    tiled = materialize(lazy.flatten(2).softmax(-1))
    exact = x.double().flatten(2).softmax(-1)
    plain = difference(x.flatten(2).softmax(-1), exact)
    assert difference(tiled, exact) <= 2 * plain + 1e-7


def self_attention(x: Tensor) -> Tensor:
    h = bag(x)
    return F.scaled_dot_product_attention(h, h, h)


def all_pairs(x: Tensor) -> Tensor:
    return (bag(x) @ x.flatten(2)).softmax(-1) @ bag(x)


@pytest.mark.parametrize("function", [self_attention, all_pairs])
def test_all_pairs_of_positions_are_tiled_by_queries(function):
    net = After(function)
    for batch in (1, 2):
        assert_exact(net, (batch, 3, 5, 7), tiles=(3, 2, 2), backward_tiles=(2, 3))
        kinds = recorded_kinds(net, (batch, 3, 5, 7))
        assert not kinds["Barrier"] and (kinds["Uncut"] or kinds["Entire"] or kinds["Gather"])


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("correction", [34, 35, 40])
@pytest.mark.parametrize("spread", [torch.var, torch.std], ids=["var", "std"])
def test_a_variance_without_freedom_is_what_pytorch_makes_of_it(spread, correction):
    """Infinite, and of equal values no number: it is divided by how many positions are left, or by zero."""
    x = torch.randn(2, 3, 5, 7, dtype=torch.float64)
    x[:, 1] = 0.5
    lazy = LazyImage.from_tensor(x, engine=asked((3, 2), (2, 3)))
    for dims, axes in (((2, 3), None), (3, 7)):
        taken = correction if axes is None else correction - 35 + axes
        expected = spread(x, dims, correction=taken)
        torch.testing.assert_close(materialize(spread(lazy, dims, correction=taken)), expected, equal_nan=True)


def test_running_sums_of_all_positions_are_a_barrier_and_exact():
    net = After(lambda x: x.flatten(2).cumsum(2))
    assert_exact(net, (2, 3, 5, 7))
    assert recorded_kinds(net, (1, 3, 5, 7))["Barrier"]


class HandMade(nn.Module):
    """A BatchNorm as users write it, with statistics they update themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * mean)
            self.var.copy_(0.9 * self.var + 0.1 * var)
        return (x - mean.view(1, -1, 1, 1)) * torch.rsqrt(var.view(1, -1, 1, 1) + 1e-5)


def test_statistics_of_hand_made_batch_norm_are_updated():
    assert_tiled(nn.Sequential(nn.Conv2d(3, 4, 3), HandMade(), nn.ReLU(), nn.Conv2d(4, 2, 3)), (2, 3, 11, 9))


@settings(max_examples=12)
@given(
    st.sampled_from([weighted, weighted_einsum, weighted_map_einsum, multihead, best_features]),
    st.tuples(st.integers(1, 3), st.just(3), st.integers(2, 13), st.integers(2, 13)),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
)
def test_any_size_and_grid(pool, shape, tiles, backward):
    net = After(lambda x: best_features(x, 2)) if pool is best_features else After(pool, w=(4, 2))
    assert_tiled(net, shape, joins=None, tiles=tiles, backward_tiles=backward)
