"""Calls of PyTorch's, on a map and on a vector: what the lists of PyTorch's own tests have beside the operators that
networks are made of.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_plugin import TiledModule
from lightning_plugin.errors import PlanError
from tests.exactness import TOLERANCE, compare, difference, real
from tests.sampling import sampled

#: Grids, and a budget under which all is kept.
WAYS: dict[str, dict[str, Any]] = {"tiles": {"tiles": (2, 3)}, "kept": {"budget": "64MiB"}}
SHAPE = (2, 4, 6, 9)
Calls = dict[str, Callable[[Tensor], Any]]

FIXED = torch.Generator().manual_seed(1)
OTHER = torch.rand(SHAPE, generator=FIXED, dtype=torch.float64) + 0.5
MASK = torch.rand(SHAPE, generator=FIXED) > 0.4
PLACES = torch.randint(4, SHAPE, generator=FIXED)
SYMMETRIC = torch.eye(6, dtype=torch.float64) * 9


def square(h: Tensor) -> Tensor:
    """Matrices of 6 x 6, far from singular."""
    return h[..., :6] + SYMMETRIC


def definite(h: Tensor) -> Tensor:
    return square(h) @ square(h).mT


def written(h: Tensor, name: str, *args: Any) -> Tensor:
    """The tensor that a method in place has written."""
    h = h * 1
    getattr(h, name)(*args)
    return h


def into(h: Tensor, index: Any, new: Any) -> Tensor:
    h = h * 1
    h[index] = new
    return h


POINTWISE: Calls = {
    "addcdiv": lambda h: torch.addcdiv(h, OTHER, OTHER + 1, value=0.3),
    "addcmul": lambda h: torch.addcmul(h, h, OTHER, value=2),
    "acosh": lambda h: torch.acosh(h.abs() + 1.5),
    "atan2": lambda h: torch.atan2(h, OTHER),
    "bucketize": lambda h: torch.bucketize(h.detach(), torch.tensor([0.0, 0.5])).double() * h,
    "clamp by a tensor": lambda h: h.clamp(OTHER - 1, OTHER),
    "copysign": lambda h: torch.copysign(h, OTHER - 0.7),
    "deg2rad": torch.deg2rad,
    "digamma": lambda h: torch.digamma(h.abs() + 1),
    "erfinv": lambda h: torch.erfinv(h.tanh() * 0.9),
    "fmod": lambda h: torch.fmod(h, OTHER),
    "frexp": lambda h: torch.frexp(h)[0],
    "heaviside": lambda h: torch.heaviside(h.detach(), OTHER) * h,
    "hypot": lambda h: torch.hypot(h, OTHER),
    "i0": torch.i0,
    "isclose": lambda h: torch.isclose(h, OTHER, atol=0.5).double() * h,
    "ldexp": lambda h: torch.ldexp(h, PLACES),
    "lerp": lambda h: torch.lerp(h, OTHER, 0.3),
    "lgamma": lambda h: torch.lgamma(h.abs() + 1),
    "logaddexp": lambda h: torch.logaddexp(h, OTHER),
    "logit": lambda h: torch.logit(h.sigmoid(), 1e-3),
    "nan_to_num": lambda h: torch.nan_to_num(torch.where(MASK, h, float("nan")), 0.5),
    "nextafter": lambda h: torch.nextafter(h.detach(), OTHER),
    "polygamma": lambda h: torch.polygamma(1, h.abs() + 1),
    "remainder": lambda h: torch.remainder(h, OTHER),
    "sinc": torch.sinc,
    "xlogy": lambda h: torch.special.xlog1py(h, OTHER),
    "zeta": lambda h: torch.special.zeta(h.abs().detach() + 2, OTHER + 1),
    "float_power": lambda h: torch.float_power(h.abs() + 0.1, OTHER),
    "where a number": lambda h: torch.where(MASK, h, 2.0),
}
REDUCTIONS: Calls = {
    "argmax": lambda h: h.argmax(),
    "argmin": lambda h: h.argmin(),
    "argmin of rows": lambda h: h.argmin(2, keepdim=True),
    "aminmax": lambda h: torch.aminmax(h),
    "all and any": lambda h: ((h > 0).all(3) | (h < 0).any(3)).double(),
    "count_nonzero": lambda h: torch.count_nonzero(h > 0, (2, 3)),
    "cov": lambda h: torch.cov(h[0].flatten(1)),
    "corrcoef": lambda h: torch.corrcoef(h[1].flatten(1)),
    "dist": lambda h: torch.dist(h, OTHER, 3),
    "histc": lambda h: torch.histc(h.detach(), 5),
    "kthvalue": lambda h: torch.kthvalue(h, 3, 3),
    "logcumsumexp": lambda h: torch.logcumsumexp(h, 2),
    "cummax": lambda h: torch.cummax(h, 3).values,
    "cumprod": lambda h: torch.cumprod(h, 1),
    "cumulative_trapezoid": lambda h: torch.cumulative_trapezoid(h, dim=3),
    "median": lambda h: h.median(3).values,
    "mode": lambda h: (h * 2).round().mode(3).values + h.sum(3),
    "nanmean": lambda h: torch.where(MASK, h, float("nan")).nanmean((1, 2, 3)),
    "nanmedian": lambda h: torch.where(MASK, h, float("nan")).nanmedian(3).values.nan_to_num(),
    "nanquantile": lambda h: torch.where(MASK, h, float("nan")).nanquantile(0.4, 1).nan_to_num(),
    "prod": lambda h: h.prod(1),
    "renorm": lambda h: h.renorm(2, 1, 0.7),
    "std of all": lambda h: h.std(),
    "trapezoid": lambda h: torch.trapezoid(h, dim=2),
}
PLACED: Calls = {
    "diff": lambda h: h.diff(dim=2, append=OTHER[:, :, :1]),
    "gather": lambda h: h.gather(1, PLACES),
    "index_add": lambda h: h.index_add(1, torch.tensor([1, 1, 3]), OTHER[:, :3], alpha=2),
    "index_copy": lambda h: h.index_copy(1, torch.tensor([2, 0]), OTHER[:, :2]),
    "index_fill": lambda h: h.index_fill(3, torch.tensor([2, 2, 0]), 0.5),
    "index_put": lambda h: h.index_put((torch.tensor([1]), torch.tensor([0, 3])), OTHER[0, :2]),
    "index_put at a mask": lambda h: torch.index_put(h, (MASK,), h.sum(), accumulate=True),
    "index_reduce": lambda h: h.index_reduce(1, torch.tensor([1, 0]), OTHER[:, :2], "amax"),
    "masked_fill by a tensor": lambda h: h.masked_fill(MASK, h.mean()),
    "masked_scatter": lambda h: h.masked_scatter(MASK, OTHER),
    "masked_select": lambda h: h.masked_select(MASK),
    "put": lambda h: h.put(torch.tensor([3, 7, 3]), OTHER.flatten()[:3], accumulate=True),
    "scatter": lambda h: h.scatter(1, PLACES[:, :1], OTHER),
    "scatter a number": lambda h: h.scatter(1, PLACES[:, :1], 2.0),
    "scatter_add": lambda h: h.scatter_add(1, PLACES, OTHER),
    "scatter_reduce": lambda h: h.scatter_reduce(1, PLACES, OTHER, "mean"),
    "take": lambda h: h.take(torch.tensor([[1, 5], [5, 0]])),
    "take_along_dim": lambda h: h.take_along_dim(PLACES[:, :1], 1),
    "repeat_interleave": lambda h: h.repeat_interleave(torch.tensor([1, 0, 2, 1]), 1),
    "searchsorted": lambda h: torch.searchsorted(h.detach().sort(-1).values, OTHER),
    "sort": lambda h: h.sort(1, descending=True).values,
    "topk": lambda h: h.topk(2, 1).values,
    "unique": lambda h: (h.detach() * 2).round().unique(),
    "a mask set to a sum": lambda h: into(h, MASK, h.sum()),
    "rows set to a sum": lambda h: into(h, (slice(None), torch.tensor([2, 0])), h.sum()),
}
SHAPED: Calls = {
    "as_strided": lambda h: torch.as_strided(h, (3, 4), (2, 5), 1),
    "as_strided_": lambda h: (h * 1).as_strided_((4, 3), (9, 2)),
    "block_diag": lambda h: torch.block_diag(h[0, 0], h[1, 1]),
    "broadcast_to": lambda h: h.broadcast_to((3, *SHAPE)),
    "cartesian": lambda h: torch.cartesian_prod(h[0, 0, 0], h[1, 1, 1, :2]),
    "combinations": lambda h: torch.combinations(h[0, 0, 0], 2),
    "diag_embed": lambda h: h.diag_embed(),
    "diagonal": lambda h: h.diagonal(1, 2, 3),
    "dsplit": lambda h: torch.dsplit(h, 3),
    "tensor_split": lambda h: h.tensor_split((1, 1, 3), 1),
    "tensor_split by a tensor": lambda h: torch.tensor_split(h, torch.tensor([2]), 1)[1],
    "hstack": lambda h: torch.hstack([h, h.flip(1)]),
    "kron": lambda h: torch.kron(h[0, 0], OTHER[0, 0, :2, :2]),
    "movedim": lambda h: h.movedim((1, 3), (3, 0)),
    "rot90": lambda h: h.rot90(1, (2, 3)),
    "shape": lambda h: torch._shape_as_tensor(h),
    "to_sparse": lambda h: (h[:, 0] * MASK[:, 0]).to_sparse().to_dense(),
    "tril": lambda h: h.tril(-1),
    "trace": lambda h: torch.trace(h[1, 2]),
    "unfold": lambda h: h.unfold(3, 4, 2),
    "unsafe_chunk": lambda h: torch.unsafe_chunk(h, 2, 1),
    "view_as": lambda h: h.contiguous().view_as(torch.empty(8, 54)),
}
ALGEBRA: Calls = {
    "addbmm": lambda h: torch.addbmm(h[0, 0], h[:, 0, :, :6], OTHER[:, 1]),
    "addmv": lambda h: torch.addmv(h[0, 0, :, 0], h[1, 1], OTHER[0, 0, 0]),
    "addr": lambda h: torch.addr(h[0, 0], h[0, 1, :, 0], OTHER[0, 0, 0]),
    "baddbmm": lambda h: torch.baddbmm(h[:, 0], h[:, 1, :, :6], OTHER[:, 1], beta=0.5),
    "cdist": lambda h: torch.cdist(h[:, 0], OTHER[:, 0]),
    "chain_matmul": lambda h: torch.linalg.multi_dot([h[0, 0], h[0, 1].T, OTHER[0, 0]]),
    "cholesky": lambda h: torch.linalg.cholesky(definite(h)),
    "cosine_similarity": lambda h: F.cosine_similarity(h, OTHER, 3),
    "cross": lambda h: torch.linalg.cross(h[:, :3], OTHER[:, :3], dim=1),
    "det": lambda h: torch.linalg.slogdet(square(h)),
    "eigvalsh": lambda h: torch.linalg.eigvalsh(definite(h)),
    "inv": lambda h: torch.linalg.inv(square(h)),
    "lstsq": lambda h: torch.linalg.lstsq(h.mT, OTHER.mT).solution,
    "matrix_exp": lambda h: torch.linalg.matrix_exp(square(h) / 9),
    "matrix_norm": lambda h: torch.linalg.matrix_norm(h),
    "matrix_power": lambda h: torch.linalg.matrix_power(square(h) / 9, 3),
    "pca_lowrank": lambda h: torch.pca_lowrank(h[0, 0])[1],
    "pinv": lambda h: torch.linalg.pinv(h[0]),
    "solve": lambda h: torch.linalg.solve(square(h), OTHER),
    "svdvals": lambda h: torch.linalg.svdvals(h),
    "tensordot": lambda h: torch.tensordot(h, OTHER, ([1, 3], [1, 3])),
    "tensorinv": lambda h: torch.linalg.tensorinv(square(h)[0, 0].reshape(2, 3, 6)),
    "vdot": lambda h: torch.vdot(h.flatten(), OTHER.flatten()),
    "stft": lambda h: torch.stft(h[:, 0].flatten(1), 8, window=torch.ones(8), return_complex=True).abs(),
    "rfft": lambda h: torch.fft.rfft(h).abs(),
}
OF_NETWORKS: Calls = {
    "bilinear": lambda h: F.bilinear(h, OTHER, OTHER[0, :3, :, :].new_ones(3, 9, 9)),
    "celu_": lambda h: F.celu_(h * 1),
    "ctc_loss": lambda h: F.ctc_loss(h[:, 0].log_softmax(-1).mT[:, None, 0], torch.tensor([1, 2]), (2,), (2,)),
    "embedding_bag": lambda h: F.embedding_bag(torch.tensor([1, 0, 2]), h[0, 0], torch.tensor([0, 2])),
    "fold": lambda h: F.fold(F.unfold(h, 2), SHAPE[2:], 2),
    "gaussian_nll_loss": lambda h: F.gaussian_nll_loss(h, OTHER, h.abs() + 0.1),
    "glu": lambda h: F.glu(h, 1),
    "hinge_embedding_loss": lambda h: F.hinge_embedding_loss(h, MASK * 2.0 - 1),
    "hardshrink": lambda h: F.hardshrink(h, 0.2),
    "kl_div": lambda h: F.kl_div(h.log_softmax(1), OTHER, reduction="batchmean"),
    "local_response_norm": lambda h: F.local_response_norm(h, 3),
    "lp_pool2d": lambda h: F.lp_pool2d(h.abs() + 0.1, 2, 2),
    "margin_ranking_loss": lambda h: F.margin_ranking_loss(h, OTHER, torch.ones(SHAPE)),
    "max_unpool2d": lambda h: F.max_unpool2d(*F.max_pool2d(h, (2, 3), return_indices=True), (2, 3)),
    "multi_margin_loss": lambda h: F.multi_margin_loss(h.flatten(2).mT.flatten(0, 1), PLACES[:, 0].flatten()),
    "multilabel_soft_margin_loss": lambda h: F.multilabel_soft_margin_loss(h[:, :, 0, 0], MASK[:, :, 0, 0].double()),
    "pairwise_distance": lambda h: F.pairwise_distance(h, OTHER),
    "pdist": lambda h: F.pdist(h[0, 0]),
    "poisson_nll_loss": lambda h: F.poisson_nll_loss(h, OTHER, full=True),
    "rms_norm": lambda h: F.rms_norm(h, (9,)),
    "soft_margin_loss": lambda h: F.soft_margin_loss(h, MASK * 2.0 - 1),
    "softmin": lambda h: F.softmin(h, 1),
    "threshold": lambda h: F.threshold(h, 0.1, 0.3),
    "triplet_margin_loss": lambda h: F.triplet_margin_loss(h, OTHER, h.flip(1)),
}
IN_PLACE: Calls = {
    "addcmul_": lambda h: written(h, "addcmul_", OTHER, OTHER),
    "baddbmm_": lambda h: (lambda t: t.baddbmm_(h[:, 1, :, :6], OTHER[:, 1]))(h[:, 0] * 1),
    "clamp_": lambda h: written(h, "clamp_", -0.3, 0.4),
    "copy_ of a number": lambda h: written(h, "copy_", 2.0) + h,
    "copy_ of a row": lambda h: written(h, "copy_", OTHER[0, 0]) + h,
    "cumsum_": lambda h: written(h, "cumsum_", 1),
    "fmod_": lambda h: written(h, "fmod_", 0.4),
    "index_fill_": lambda h: written(h, "index_fill_", 1, torch.tensor([0]), 2.0),
    "lerp_": lambda h: written(h, "lerp_", OTHER, 0.2),
    "masked_fill_": lambda h: written(h, "masked_fill_", MASK, 0.2),
    "masked_scatter_": lambda h: written(h, "masked_scatter_", MASK, OTHER),
    "pow_": lambda h: written(h.abs() + 0.1, "pow_", 1.5),
    "renorm_": lambda h: written(h, "renorm_", 2, 1, 0.7),
    "scatter_add_": lambda h: written(h, "scatter_add_", 1, PLACES, OTHER),
    "sinc_": lambda h: written(h, "sinc_"),
    "squeeze_": lambda h: (h[:, :1] * 1).squeeze_(1),
    "swapaxes_": lambda h: (h * 1).swapaxes_(1, 2),
    "tril_": lambda h: written(h, "tril_"),
    "xlogy_": lambda h: written(h, "xlogy_", OTHER),
    "zero_": lambda h: written(h, "zero_") + h,
    "dropout of nothing": lambda h: F.dropout(h * 1, 0.0, True, True),
}
FAMILIES = {
    "pointwise": POINTWISE, "reductions": REDUCTIONS, "places": PLACED, "shapes": SHAPED, "algebra": ALGEBRA,
    "networks": OF_NETWORKS, "in place": IN_PLACE,
}  # fmt: skip


class Called(nn.Module):
    """The results of calls on a map, or on a vector of the same shape."""

    def __init__(self, calls: Calls, on_vector: bool) -> None:
        super().__init__()
        self.calls, self.on_vector = calls, on_vector
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.conv(x)
        if self.on_vector:
            h = OTHER * h.mean((2, 3), keepdim=True)
        return {name: call(h) for name, call in self.calls.items()}


def flat(results: dict[str, Any]) -> dict[str, Tensor]:
    parts = {name: torch.utils._pytree.tree_leaves(found) for name, found in results.items()}
    return {f"{name} {i}": t for name, found in parts.items() for i, t in enumerate(found)}


def step(net: nn.Module, run: nn.Module, x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The results of calls, and the image's gradient of their sum."""
    x = x.clone().requires_grad_()
    found = flat(run(x))
    rng = torch.Generator().manual_seed(2)
    loss = sum(
        (real(t) * torch.randn(real(t).shape, generator=rng, dtype=torch.float64)).sum()
        for t in found.values()
        if t.requires_grad
    )
    assert isinstance(loss, Tensor)
    loss.backward()
    assert x.grad is not None
    return found, x.grad


@pytest.mark.parametrize(("family", "place", "way"), sampled(FAMILIES, ["map", "vector"], WAYS, every=2))
def test_a_call_is_plain_pytorchs(family: str, place: str, way: str) -> None:
    torch.manual_seed(0)
    plain = Called(FAMILIES[family], place == "vector").double()
    tiled = copy.deepcopy(plain)
    x = torch.randn(2, 3, 6, 9, dtype=torch.float64)
    expected, theirs = step(plain, plain, x)
    found, ours = step(tiled, TiledModule(tiled, **WAYS[way]), x)
    assert list(found) == list(expected)
    for name, t in expected.items():
        a = found[name]
        assert (a.dtype, a.shape, a.requires_grad) == (t.dtype, t.shape, t.requires_grad), name
        assert difference(a.detach(), t.detach()) < TOLERANCE, name
    errors = compare(plain, tiled, [], [], (ours, theirs))
    assert all(e < TOLERANCE for e in errors.values()), errors


@pytest.mark.parametrize("way", WAYS)
def test_what_depends_on_data_in_backward_is_refused_under_a_budget_alone(way: str) -> None:
    """The gradient of a number that a computed mask places needs the mask's positions."""
    calls: Calls = {"a drawn mask": lambda h: into(h, h > 0, h.sum())}
    torch.manual_seed(0)
    plain = Called(calls, False).double()
    tiled = copy.deepcopy(plain)
    x = torch.randn(2, 3, 6, 9, dtype=torch.float64)
    if way == "kept":
        with pytest.raises(PlanError, match=r"depends on the data.*torch\.where"):
            TiledModule(tiled, **WAYS[way])(x)
        return
    _, theirs = step(plain, plain, x)
    _, ours = step(tiled, TiledModule(tiled, **WAYS[way]), x)
    assert difference(ours, theirs) < TOLERANCE
