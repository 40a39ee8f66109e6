"""What selects by value gives its gradient to what forward selected, whatever bits backward's tiles come to."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_plugin import LazyImage, TileSource
from lightning_plugin.boxes import Box
from lightning_plugin.engine import Engine
from lightning_plugin.layout import Layout
from lightning_plugin.rules.reductions import Extreme
from tests.exactness import asked
from tests.sampling import sampled

SELECTIONS = {
    "amax": lambda x: x.amax((2, 3)),
    "amin": lambda x: -x.amin((2, 3)),
    "amax of all": lambda x: x.amax((0, 1, 2, 3)),
    "max": lambda x: x.flatten(2).max(2).values,
    "min": lambda x: -x.flatten(2).min(2).values,
    "adaptive_max_pool": lambda x: F.adaptive_max_pool2d(x, 1).flatten(1),
    "adaptive_max_pool bins": lambda x: F.adaptive_max_pool2d(x, (3, 2)).flatten(1),
    "topk": lambda x: x.flatten(2).topk(5, 2).values.sum(2),
    "max_pool": lambda x: F.max_pool2d(x, 3, 2, 1).mean((2, 3)),
    "sort": lambda x: x.flatten(2).sort(2).values[:, :, -3:].sum(2),
    "median": lambda x: x.flatten(2).median(2).values,
    "kthvalue": lambda x: x.flatten(2).kthvalue(7, 2).values,
}


def noise(generator: torch.Generator) -> Tensor:
    return torch.randn(1, 3, 64, 60, generator=generator)


def repeated(generator: torch.Generator) -> Tensor:
    return torch.randn(1, 3, 16, 15, generator=generator).repeat(1, 1, 4, 4)


def mirrored(generator: torch.Generator) -> Tensor:
    half = torch.randn(1, 3, 64, 30, generator=generator)
    return torch.cat([half, half.flip(3)], 3)


def background(generator: torch.Generator) -> Tensor:
    image = torch.ones(1, 3, 64, 60)
    image[:, :, 20:31, 17:30] = torch.randn(1, 3, 11, 13, generator=generator)
    return image


def whole_numbers(generator: torch.Generator) -> Tensor:
    return torch.randint(0, 4, (1, 3, 64, 60), generator=generator).float()


CONTENTS = [noise, repeated, mirrored, background, whole_numbers]


class Background(TileSource):
    """An image that knows where it is constant."""

    def __init__(self, pixels: Tensor) -> None:
        self.pixels, self.shape, self.dtype = pixels, tuple(pixels.shape), pixels.dtype

    def read(self, box):
        return self.pixels[(..., *(slice(lo, hi) for lo, hi in box.intervals()))].clone()

    def constant(self, box):
        tile = self.read(box)
        value = tile[..., :1, :1]
        return value.flatten() if bool((tile == value).all()) else None


class Net(nn.Module):
    def __init__(self, select) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 5, padding=2), nn.ReLU(),
            nn.Conv2d(16, 8, 3, padding=1),
        )  # fmt: skip
        self.select = select

    def forward(self, x):
        return self.select(self.features(x))


def image_of(kind: str, x: Tensor, engine: Engine) -> LazyImage:
    return LazyImage(Background(x), engine=engine) if kind == "source" else LazyImage.from_tensor(x, engine=engine)


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    sampled(
        [n for n in SELECTIONS if n not in ("topk", "sort", "max_pool", "amax of all")],
        CONTENTS,
        ["tensor", "source"],
        every=3,
    ),
)
def test_no_share_of_a_gradient_is_lost(name, content, kind):
    """The gradient of the last bias is the sum of all positions' shares: one for each selected value, whoever gets
    it."""
    torch.manual_seed(0)
    net = Net(SELECTIONS[name])
    x = content(torch.Generator().manual_seed(1))
    engine = asked(tiles=(1, 2), backward_tiles=(3, 5))
    out = net(image_of(kind, x, engine)).sum()
    out.backward()
    expected = torch.full((8,), 6.0 if "bins" in name else -1.0 if name in ("amin", "min") else 1.0)
    torch.testing.assert_close(net.features[4].bias.grad, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "content", "dtype"),
    sampled(
        [n for n in SELECTIONS if n not in ("min", "amin", "median", "kthvalue")],
        [noise, repeated, whole_numbers],
        [torch.float32, torch.bfloat16, torch.float16],
        every=3,
    ),
)
def test_as_near_to_the_truth_as_plain_pytorch(name, content, dtype):
    """The gradient's distance to that of float64 is at most twice plain PyTorch's own; where several positions tie only
    in a lower precision, any choice among them is as right, so plain PyTorch's on a turned image counts too."""
    torch.manual_seed(0)
    net = Net(SELECTIONS[name])
    x = content(torch.Generator().manual_seed(1))[..., :32, :30]

    def gradient(net: nn.Module, image) -> Tensor:
        net = copy.deepcopy(net)
        out = net(image)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
        (out * weights).sum().backward()
        return torch.cat([p.grad.double().flatten() for p in net.parameters()])

    truth = gradient(copy.deepcopy(net).double(), x.double())
    low, y = copy.deepcopy(net).to(dtype), x.to(dtype)
    plain = float((gradient(low, y) - truth).norm())
    tiled = float((gradient(low, LazyImage.from_tensor(y, engine=asked((1, 2), (3, 5)))) - truth).norm())
    # The image turned and mirrored, and the kernels with it: sums in another order, as another processor would have
    # them. PyTorch's own distances are as far apart as these.
    others = [float((moved_gradient(low, y, move, gradient) - truth).norm()) for move in MOVES]
    assert tiled <= 2 * max(plain, *others) + 1e-6 * float(truth.norm())


MOVES = [
    lambda t: t.transpose(2, 3).contiguous(),
    lambda t: t.flip(2),
    lambda t: t.flip(3),
    lambda t: t.flip(2, 3).contiguous(),
]


def moved_gradient(net, x, move, gradient):
    """The gradient of a network whose image and kernels are moved, moved back."""
    moved = copy.deepcopy(net)
    for p in moved.parameters():
        if p.dim() == 4:
            p.data = move(p.data)
    flat, found = gradient(moved, move(x)), []
    for p in net.parameters():
        part, flat = flat[: p.numel()].view(p.shape), flat[p.numel() :]
        found.append((move(part) if p.dim() == 4 else part).flatten())
    return torch.cat(found)


def test_equal_shares_go_to_all_that_tie():
    """The image's own gradient, position by position: integers tie exactly, in any order of sums."""
    x = whole_numbers(torch.Generator().manual_seed(0))[:, :, :20, :24].double()
    x[:, 0] = 7  # far more ties than are remembered
    expected = x.clone().requires_grad_()
    expected.mul(2).amax((2, 3)).sum().backward()
    y = x.clone().requires_grad_()
    LazyImage.from_tensor(y, engine=asked((2, 1), (3, 2))).mul(2).amax((2, 3)).sum().backward()
    torch.testing.assert_close(y.grad, expected.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("ties", "known"), [(1, True), (2, True), (32, True), (33, False)])
@pytest.mark.parametrize("sign", [1, -1])
def test_few_positions_that_tie_are_remembered(ties: int, known: bool, sign: int) -> None:
    """Backward need not look for them again."""
    x = torch.rand(1, 2, 8, 9, dtype=torch.float64)
    x[0, 1].view(-1)[:ties] = 2 * sign
    layout = Layout.channels_first(x.shape)
    op = Extreme((2, 3), False, x.dtype, 72, layout, sign)
    left, right = Box((0, 0), (8, 4)), Box((0, 4), (8, 9))
    parts = [op.partial(box, [layout.narrow(x, Box.whole((8, 9)), box)], []) for box in (left, right)]
    best, count, where = op.finish(op.merge(*parts), [])
    assert torch.equal(best, x.amax((2, 3)) if sign > 0 else x.amin((2, 3)))
    assert count[0, 1].flatten().tolist() == [ties]
    assert op.needs_backward_results((best, count, where)) != known
    if known:
        assert sorted(w for w in where[0, 1].flatten().tolist() if w >= 0) == list(range(ties))
