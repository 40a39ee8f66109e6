"""Losses of dense predictions, with targets that are real tensors or lazy images."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_plugin import LazyImage, TiledModule, materialize
from lightning_plugin.graph import ancestors
from lightning_plugin.ops import Barrier, Gather
from tests.exactness import TOLERANCE, asked, assert_same_step, difference
from tests.lightning_plugin.rules.helpers import recorded_kinds
from tests.sampling import sampled
from tests.zoo import ZOO, fill

CLASSES = 4
SHAPE = (2, 3, 11, 13)


def targets(shape, kind: str, seed: int = 1) -> Tensor:
    """A target for a prediction of (N, CLASSES, *spatial)."""
    generator = torch.Generator().manual_seed(seed)
    size = (shape[0], CLASSES, *shape[2:])
    if kind == "classes":
        t = torch.randint(CLASSES, (shape[0], *shape[2:]), generator=generator)
        t[torch.rand(t.shape, generator=generator) < 0.2] = -100
        return t
    values = torch.rand(size, generator=generator, dtype=torch.float64)
    return (
        values.round()
        if kind == "binary"
        else values / values.sum(1, keepdim=True)
        if kind == "probabilities"
        else values
    )


def run(net: nn.Module, loss, x: Tensor, target: Tensor, tiles=(3, 2), backward=(2, 3), lazy_target=False):
    """(loss, gradients) of a network, plain and tiled, and the tiled loss before it was executed."""
    twin = copy.deepcopy(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = loss(net(x), target)
        weight = torch.randn_like(expected)
        (expected * weight).sum().backward()
        if lazy_target:
            target = lazy_map(target, x.shape)
        actual = loss(twin(LazyImage.from_tensor(x, engine=asked(tiles, backward))), target)
        nodes = ancestors([actual._value])
        (actual * weight).sum().backward()
    return expected, actual, net, twin, nodes


def lazy_map(target: Tensor, shape) -> Tensor:
    if target.dim() == len(shape):
        return LazyImage.from_tensor(target)
    return LazyImage.from_tensor(target.unsqueeze(1)).squeeze(1)


def assert_same(net, loss, shape, target, tiled=True, **how):
    x = torch.randn(shape, dtype=torch.float64)
    expected, actual, net, twin, nodes = run(net, loss, x, target, **how)
    assert difference(materialize(actual).detach(), expected.detach()) < TOLERANCE
    for (name, a), b in zip(twin.named_parameters(), net.parameters(), strict=True):
        assert difference(a.grad, b.grad, 1e-3 * max(p.grad.abs().max() for p in net.parameters())) < TOLERANCE, name
    if tiled:
        whole = [n.label for n in nodes if isinstance(n.op, (Barrier, Gather))]
        assert not whole, f"run whole: {whole}"


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.Tanh(), nn.Conv2d(5, CLASSES, 3, padding=1)).double()


WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.25], dtype=torch.float64)


def rows(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).reshape(-1, CLASSES)


def focal(x: Tensor, t: Tensor) -> Tensor:
    ce = F.cross_entropy(x, t, reduction="none")
    return ((1 - torch.exp(-ce)) ** 2 * ce).mean()


def focal_by_gather(x: Tensor, t: Tensor) -> Tensor:
    t = t.clamp(min=0)
    logp = F.log_softmax(x, 1).gather(1, t.unsqueeze(1)).squeeze(1)
    return -(WEIGHT[t] * (1 - logp.exp()) ** 2 * logp).sum()


def dice(x: Tensor, t: Tensor) -> Tensor:
    p = x.softmax(1)
    one_hot = F.one_hot(t.clamp(min=0), CLASSES).permute(0, 3, 1, 2).to(p.dtype)
    overlap = (p * one_hot).sum((0, 2, 3))
    return 1 - ((2 * overlap + 1) / ((p + one_hot).sum((0, 2, 3)) + 1)).mean()


def dice_by_scatter(x: Tensor, t: Tensor) -> Tensor:
    p = x.softmax(1)
    one_hot = torch.zeros_like(p).scatter_(1, t.clamp(min=0).unsqueeze(1), 1.0)
    return 1 - (2 * (p * one_hot).flatten(1).sum(1) / (p.square() + one_hot).flatten(1).sum(1)).mean()


def tversky(x: Tensor, t: Tensor) -> Tensor:
    p, wanted = x.sigmoid(), (t.unsqueeze(1) == torch.arange(CLASSES).view(1, -1, 1, 1)).to(x.dtype)
    tp = torch.einsum("nchw,nchw->nc", p, wanted)
    return 1 - (tp / (0.3 * p.sum((2, 3)) + 0.7 * wanted.sum(dim=[2, 3]) + 1e-3)).mean()


CLASS_LOSSES = {
    "plain": F.cross_entropy,
    "sum": lambda x, t: F.cross_entropy(x, t, reduction="sum"),
    "none": lambda x, t: F.cross_entropy(x, t, reduction="none"),
    "legacy": lambda x, t: F.cross_entropy(x, t, size_average=False),
    "weights": lambda x, t: F.cross_entropy(x, t, WEIGHT),
    "another ignored class": lambda x, t: F.cross_entropy(x, t.clamp(min=0), WEIGHT, ignore_index=2),
    "smoothing": lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
    "smoothing and weights": lambda x, t: F.cross_entropy(x, t, WEIGHT, label_smoothing=0.2),
    "smoothing sum": lambda x, t: F.cross_entropy(x, t, WEIGHT, label_smoothing=0.2, reduction="sum"),
    "module": nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=-100),
    "rows": lambda x, t: F.cross_entropy(rows(x), t.reshape(-1), WEIGHT),
    "flat": lambda x, t: F.cross_entropy(x.flatten(2), t.flatten(1)),
    "nll": lambda x, t: F.nll_loss(x.log_softmax(1), t, WEIGHT),
    "nll sum": lambda x, t: F.nll_loss(x.log_softmax(1), t, reduction="sum"),
    "focal": focal,
    "focal by gather": focal_by_gather,
    "dice": dice,
    "dice by scatter": dice_by_scatter,
    "tversky": tversky,
    "masked mean": lambda x, t: (F.cross_entropy(x, t, reduction="none") * (t == 1)).sum() / (t == 1).sum(),
    "class embedding": lambda x, t: (x * F.embedding(t.clamp(min=0), WEIGHT.diag()).permute(0, 3, 1, 2)).sum(),
    "pixel accuracy and loss": lambda x, t: F.cross_entropy(x, t) * (x.argmax(1) == t).double().mean(),
}


@pytest.mark.parametrize("lazy", [False, True], ids=["real target", "lazy target"])
@pytest.mark.parametrize("name", CLASS_LOSSES)
def test_losses_of_class_indices(name, lazy):
    assert_same(small(), CLASS_LOSSES[name], SHAPE, targets(SHAPE, "classes"), lazy_target=lazy)


PROBABILITY_LOSSES = {
    "cross entropy": F.cross_entropy,
    "with weights": lambda x, t: F.cross_entropy(x, t, WEIGHT, label_smoothing=0.1),
    "sum": lambda x, t: F.cross_entropy(x, t, reduction="sum"),
    "none": lambda x, t: F.cross_entropy(x, t, reduction="none"),
    "kl": lambda x, t: F.kl_div(x.log_softmax(1), t),
    "kl batchmean": lambda x, t: F.kl_div(x.log_softmax(1), t, reduction="batchmean"),
    "kl log": lambda x, t: F.kl_div(x.log_softmax(1), (t + 0.1).log(), log_target=True, reduction="sum"),
}


@pytest.mark.parametrize("name", PROBABILITY_LOSSES)
def test_losses_of_probabilities(name):
    assert_same(small(), PROBABILITY_LOSSES[name], SHAPE, targets(SHAPE, "probabilities"))


ELEMENTWISE = {
    "mse": F.mse_loss,
    "mse sum": lambda x, t: F.mse_loss(x, t, reduction="sum"),
    "mse none": lambda x, t: F.mse_loss(x, t, reduction="none"),
    "l1": F.l1_loss,
    "smooth l1": lambda x, t: F.smooth_l1_loss(x, t, beta=0.5),
    "huber": lambda x, t: F.huber_loss(x, t, delta=0.3, reduction="sum"),
    "bce": lambda x, t: F.binary_cross_entropy(x.sigmoid(), t),
    "bce weight": lambda x, t: F.binary_cross_entropy(x.sigmoid(), t, WEIGHT.view(-1, 1, 1)),
    "bce logits": F.binary_cross_entropy_with_logits,
    "bce logits weights": lambda x, t: F.binary_cross_entropy_with_logits(
        x, t, weight=t + 1, pos_weight=WEIGHT.view(-1, 1, 1), reduction="sum"
    ),
    "bce module": nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0, dtype=torch.float64)),
    "soft margin": lambda x, t: F.soft_margin_loss(x, t * 2 - 1),
    "hinge": lambda x, t: F.hinge_embedding_loss(x, t * 2 - 1),
    "poisson": lambda x, t: F.poisson_nll_loss(x, t),
    "poisson full": lambda x, t: F.poisson_nll_loss(x, t + 2, full=True),
    "gaussian": lambda x, t: F.gaussian_nll_loss(x, t, x.square() * 1e-3, full=True, eps=1e-4),
    "gaussian of a real variance": lambda x, t: F.gaussian_nll_loss(x, t, t + 0.1, reduction="none"),
    "cosine": lambda x, t: 1 - F.cosine_similarity(x, t + 0.1, dim=1).mean(),
    "dice and bce": lambda x, t: (
        F.binary_cross_entropy_with_logits(x, t)
        + 1
        - ((2 * (x.sigmoid() * t).sum((2, 3)) + 1) / ((x.sigmoid() + t).sum((2, 3)) + 1)).mean()
    ),
    "binary focal": lambda x, t: (
        F.binary_cross_entropy_with_logits(x, t, reduction="none")
        * torch.where(t > 0, 1 - x.sigmoid(), x.sigmoid()) ** 2
    ).mean(),
    "total variation": lambda x, t: F.mse_loss(x * t, t) + x.square().mean((2, 3)).sqrt().sum(),
}


@pytest.mark.parametrize("lazy", [False, True], ids=["real target", "lazy target"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_losses(name, lazy):
    assert_same(small(), ELEMENTWISE[name], SHAPE, targets(SHAPE, "binary"), lazy_target=lazy)


@pytest.mark.parametrize("how", [{}, {"right": True}, {"out_int32": True}], ids=str)
def test_values_by_the_bounds_that_they_lie_between(how):
    bounds = torch.tensor([-0.5, 0.0, 0.25, 1.0], dtype=torch.float64)
    x = (torch.randn(2, 3, 9, 7, dtype=torch.float64) * 4).round() / 4
    lazy = LazyImage.from_tensor(x, engine=asked((3, 2), (2, 3)))
    expected, found = (torch.bucketize(t, bounds, **how) for t in (x, lazy))
    assert found.dtype == expected.dtype
    assert torch.equal(materialize(found), expected)
    assert recorded_kinds(lambda x: torch.bucketize(x, bounds, **how), (1, 3, 9, 7))["Barrier"] == 0


def test_a_volume():
    torch.manual_seed(0)
    shape = (2, 3, 5, 6, 7)
    net = nn.Sequential(nn.Conv3d(3, CLASSES, 3, padding=1)).double()
    assert_same(net, CLASS_LOSSES["weights"], shape, targets(shape, "classes"), tiles=(2, 3, 2))


def test_all_ignored_is_nan_as_in_plain_pytorch():
    x = LazyImage.from_tensor(torch.randn(1, CLASSES, 5, 6))
    assert F.cross_entropy(x, torch.full((1, 5, 6), -100)).isnan().item()


def test_a_class_out_of_range_is_an_error():
    x = LazyImage.from_tensor(torch.randn(1, CLASSES, 5, 6))
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        F.cross_entropy(x, torch.full((1, 5, 6), CLASSES)).item()


def test_a_negative_variance_is_an_error():
    x = LazyImage.from_tensor(torch.randn(1, 2, 5, 6))
    with pytest.raises(ValueError, match="negative"):
        F.gaussian_nll_loss(x, torch.zeros(1, 2, 5, 6), x - 10).item()


@pytest.mark.parametrize("how", [{"tiles": 2}, {"budget": "1MiB"}])
def test_a_variance_of_a_vector_is_checked_where_it_is_computed(how):
    """A plan is made without data, of which PyTorch's own check asks."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    tiled, x = copy.deepcopy(net), torch.randn(2, 3, 12, 12, dtype=torch.float64)

    class Loss(nn.Module):
        def __init__(self, sign: float) -> None:
            super().__init__()
            self.net, self.sign = tiled, sign

        def forward(self, x: Tensor) -> Tensor:
            made = self.net(x)
            return F.gaussian_nll_loss(made, made.detach() + 1, self.sign * (made.square() + 0.1))

    made = net(x)
    expected = F.gaussian_nll_loss(made, made.detach() + 1, made.square() + 0.1)
    assert_same_step(net, tiled, expected, TiledModule(Loss(1.0), **how)(x))
    with pytest.raises(ValueError, match="negative"):
        TiledModule(Loss(-1.0), **how)(x)


UNETS = [name for name in ZOO if name.startswith("unet") and ZOO[name].dense and len(ZOO[name].shape) == 4]


@pytest.mark.parametrize(("kind", "name"), sampled(["cross entropy", "dice and bce"], UNETS, every=4))
def test_a_segmentation_network_with_its_loss(name, kind):
    entry = ZOO[name]
    net = fill(entry.build()).double()
    net = net.eval() if entry.stochastic else net.train()
    x = torch.randn(entry.shape, dtype=torch.float64)
    with torch.no_grad():
        out = copy.deepcopy(net)(x)
    generator = torch.Generator().manual_seed(2)
    if kind == "cross entropy":
        t = torch.randint(-1, out.shape[1], (len(out), *out.shape[2:]), generator=generator)
        weight = torch.rand(out.shape[1], generator=generator, dtype=torch.float64) + 0.5
        loss = lambda x, t: F.cross_entropy(x, t, weight, ignore_index=-1)  # noqa: E731
    else:
        t = torch.rand(out.shape, generator=generator, dtype=torch.float64).round()
        loss = ELEMENTWISE[kind]
    assert_same(net, loss, entry.shape, t, tiled=False)


@settings(max_examples=10)
@given(
    st.sampled_from(sorted(CLASS_LOSSES)),
    st.tuples(st.integers(1, 3), st.just(3), st.integers(1, 12), st.integers(1, 12)),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.booleans(),
)
def test_any_size_and_grid(name, shape, tiles, lazy):
    t = targets(shape, "classes")
    t.view(-1)[0] = 1  # something counts
    assert_same(small(), CLASS_LOSSES[name], shape, t, tiles=tiles, lazy_target=lazy)
