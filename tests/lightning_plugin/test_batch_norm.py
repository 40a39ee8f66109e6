"""Norms: a kernel of PyTorch's that goes wrong for one image, and running statistics that move for few positions."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_plugin import LazyImage, TiledModule
from tests.exactness import TOLERANCE, assert_exact, difference


class ByArithmetic(nn.BatchNorm2d):
    """The same normalisation in operators that have no kernel of their own."""

    def forward(self, x: Tensor) -> Tensor:
        line = [1, -1, 1, 1]
        if self.training:
            mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
        else:
            assert self.running_mean is not None and self.running_var is not None
            mean, var = self.running_mean, self.running_var
        scaled = (x - mean.view(line)) / (var.view(line) + self.eps).sqrt()
        return scaled * self.weight.view(line) + self.bias.view(line)


class Pooled(nn.Module):
    """Features, normalised, and pooled by attention over positions."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, 2, 1), norm
        self.weight, self.head = nn.Linear(6, 1), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        bag = nn.functional.softplus(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
        attention = torch.softmax(self.weight(bag).transpose(1, 2), -1)
        return self.head(torch.bmm(attention, bag).squeeze(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "how", [{"tiles": (2, 3)}, {"tiles": 1}, {"budget": "1GiB"}], ids=["tiled", "one tile", "kept"]
)
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("images", [1, 2])
def test_gradients_are_those_of_arithmetic(images: int, train: bool, how: dict) -> None:
    torch.manual_seed(0)
    judge = Pooled(ByArithmetic(6)).double().train(train)
    with torch.no_grad():
        for t in (judge.norm.running_mean, judge.norm.running_var, judge.norm.weight, judge.norm.bias):
            t.uniform_(0.5, 2.0)
    net = Pooled(nn.BatchNorm2d(6)).double().train(train)
    net.load_state_dict(copy.deepcopy(judge.state_dict()))
    x = torch.randn(images, 3, 37, 29, dtype=torch.float64)
    twin = x.clone().requires_grad_()
    x.requires_grad_()
    judge(x).square().sum().backward()
    TiledModule(net, **how)(LazyImage.from_tensor(twin)).square().sum().backward()
    expected = {n: p.grad for n, p in judge.named_parameters()} | {"image": x.grad}
    found = {n: p.grad for n, p in net.named_parameters()} | {"image": twin.grad}
    largest = max(float(g.abs().max()) for g in expected.values())
    errors = {n: difference(found[n], g, 1e-3 * largest) for n, g in expected.items()}
    assert all(e < TOLERANCE for e in errors.values()), errors


class FewPositions(nn.Module):
    """A norm of two positions, which are a vector, used three times in one call."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        pooled = nn.functional.adaptive_avg_pool2d(x, (2, 1))
        return self.norm(self.norm(pooled)) + self.norm(2 * pooled)  # type: ignore[no-any-return]


@pytest.mark.parametrize("used", [True, False], ids=["pulled back", "dropped"])
@pytest.mark.parametrize("norm", [nn.InstanceNorm2d, nn.BatchNorm2d])
def test_running_statistics_of_few_positions_move(norm: type[nn.Module], used: bool) -> None:
    torch.manual_seed(0)
    plain = FewPositions(norm(3, momentum=0.3, affine=True, track_running_stats=True).double())
    net = copy.deepcopy(plain)
    for _ in range(3):
        x = torch.randn(2, 3, 5, 3, dtype=torch.float64)
        plain(x).square().sum().backward()
        out = TiledModule(net, tiles=(2, 1))(LazyImage.from_tensor(x))
        if used:
            out.square().sum().backward()
        del out
    for (name, expected), found in zip(plain.named_buffers(), net.buffers(), strict=True):
        assert difference(found.double(), expected.double()) < TOLERANCE, name


class InChunks(nn.Module):
    """A BatchNorm that meets patches two by two, and the last alone: maps, and then a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        patches = x.unfold(2, 4, 4).transpose(1, 2).flatten(0, 1).transpose(-2, -1)
        return torch.cat([self.norm(chunk).mean((2, 3)) for chunk in patches.split(2)])


def test_running_statistics_move_in_the_order_of_the_code() -> None:
    """A call on a vector may run before one on a map, and moves the same buffers; what it saved is not written to."""
    torch.manual_seed(0)
    judge = InChunks().double()
    net = copy.deepcopy(judge)
    x = torch.randn(1, 3, 12, 4, dtype=torch.float64)
    for _ in range(2):
        for one, image in ((judge, x), (net, LazyImage.from_tensor(x))):
            one(image).square().sum().backward()
    for name, value in judge.state_dict().items():
        assert difference(net.state_dict()[name], value) < TOLERANCE, name
    floor = 1e-3 * max(float(p.grad.abs().max()) for p in judge.parameters())
    for p, q in zip(net.parameters(), judge.parameters(), strict=True):
        assert difference(p.grad, q.grad, floor) < TOLERANCE


class Checkpointed(nn.Module):
    """Two blocks that are computed again in backward, and share a norm; the first is reached by no image's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 3, bias=False).requires_grad_(False), nn.BatchNorm2d(6)
        self.conv, self.head = nn.Conv2d(6, 6, 3), nn.Linear(6, 2)

    def first(self, x: Tensor) -> Tensor:
        return self.norm(self.stem(x))  # type: ignore[no-any-return]

    def second(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(self.norm(x)).relu()).tanh()  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.first, x, use_reentrant=False)
        return self.head(checkpoint(self.second, x, use_reentrant=False).mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", [{"tiles": (2, 3)}, {"budget": "1GiB"}], ids=["tiled", "kept"])
def test_a_checkpointed_block_moves_its_statistics_as_in_plain_pytorch(how: dict) -> None:
    """Once in forward, and once in each backward pass that computes it again; never without grad."""
    torch.manual_seed(0)
    judge = Checkpointed().double()
    net = copy.deepcopy(judge)
    tiled = TiledModule(net, **how)
    for step in range(2):
        x = torch.randn(2, 3, 14, 15, dtype=torch.float64)
        for one, other in ((judge, judge), (tiled, net)):
            with torch.no_grad():
                one(x)
            loss = one(x).square().sum()
            loss.backward(retain_graph=step == 1)
            if step:
                loss.backward()
            assert other.norm.num_batches_tracked == (9, 21)[step]
        for name, value in judge.state_dict().items():
            assert difference(net.state_dict()[name], value) < TOLERANCE, name


NORMS = {
    "batch": lambda: nn.BatchNorm2d(4),
    "free of parameters": lambda: nn.BatchNorm2d(4, affine=False, momentum=None),
    "instance": lambda: nn.InstanceNorm2d(4, track_running_stats=True),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("read", [None, 1, 2, 3])
def test_a_value_read_within_a_checkpointed_block_counts_no_batch_twice(
    norm: str, frozen: bool, read: int | None
) -> None:
    """PyTorch runs such a block again in backward, and what is recorded of it as well; a frozen block it does not."""
    block = nn.Sequential(NORMS[norm](), nn.Conv2d(4, 4, 3), NORMS[norm](), nn.Tanh())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = block.requires_grad_(not frozen), nn.Linear(4, 2)

        def run(self, x: Tensor) -> Tensor:
            for i, layer in enumerate(self.block):
                if i == read and float(x.detach().abs().mean()) < 0:
                    x = -x
                x = layer(x)
            return x

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.run, x, use_reentrant=False).mean((2, 3)))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    judge = Net().double()
    net = copy.deepcopy(judge)
    tiled = TiledModule(net, tiles=(2, 2))
    for _ in range(2):
        x = torch.randn(2, 4, 11, 12, dtype=torch.float64)
        for one in (judge, tiled):
            one(x).square().sum().backward()
    for name, value in judge.state_dict().items():
        assert difference(net.state_dict()[name], value) < TOLERANCE, name


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("flat", [False, True])
def test_a_norm_of_pooled_features_moves_its_statistics(flat: bool, momentum: float | None) -> None:
    """It has no map to go over, and moves its buffers once, as the norms of maps do."""
    norm = nn.BatchNorm1d(4, momentum=momentum) if flat else nn.BatchNorm2d(4, momentum=momentum)
    pool = [nn.AdaptiveAvgPool2d(1), *([nn.Flatten()] if flat else [])]
    net = nn.Sequential(nn.Conv2d(3, 4, 3), *pool, norm, nn.Linear(4, 2) if flat else nn.Conv2d(4, 2, 1))
    assert_exact(net, (5, 3, 9, 7))
    assert norm.running_mean is not None and norm.running_mean.any()


@pytest.mark.parametrize("training", [False, True])
def test_vectors_of_an_instance_norm_may_be_written_before_backward(training: bool) -> None:
    """PyTorch copies the statistics in eval mode, and the scale and the shift in both."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)).double()
    net(torch.randn(2, 3, 9, 8, dtype=torch.float64))
    found = []
    x = torch.randn(2, 3, 9, 8, dtype=torch.float64)
    for one in (net, copy.deepcopy(net)):
        one.train(training)
        y = (one if one is net else TiledModule(one, tiles=(2, 2)))(x).square().mean()
        one[1].reset_running_stats()
        with torch.no_grad():
            one[1].weight.mul_(2)
        y.backward()
        found.append([p.grad for p in one.parameters()])
    floor = 1e-3 * max(float(g.abs().max()) for g in found[0])
    for expected, own in zip(*found, strict=True):
        assert difference(own, expected, floor) < TOLERANCE
