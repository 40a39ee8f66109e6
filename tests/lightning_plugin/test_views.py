"""Writes through views of recorded tensors: what plain PyTorch gives, or one clear error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_plugin import LazyImage, TiledModule
from lightning_plugin.errors import RecordingError
from tests.exactness import asked, assert_exact


class Net(nn.Module):
    """A convolution, something that writes in place, and a convolution of the result."""

    def __init__(self, write: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.write = write
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.second = nn.Conv2d(6, 4, 3)
        self.p = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.write(self, self.first(x))).square().mean((2, 3))


def channel_set(net: Net, y: Tensor) -> Tensor:
    y[:, 0] = 0
    return y


def channels_scaled(net: Net, y: Tensor) -> Tensor:
    y[:, :2].mul_(2)
    return y


def rows_set(net: Net, y: Tensor) -> Tensor:
    y[..., 3:7, :] = 1.0
    return y


def base_written(net: Net, y: Tensor) -> Tensor:
    view = y[:, 1:3]
    y.mul_(2)
    return y * view.sum(1, keepdim=True)


def overlapping_views(net: Net, y: Tensor) -> Tensor:
    one, other = y[:, 1:3], y[:, 2:5]
    one.mul_(2)
    other.add_(1)
    return y + one.sum(1, keepdim=True) + other.mean(1, keepdim=True)


def every_second(net: Net, y: Tensor) -> Tensor:
    y[:, ::2] = 3 * y[:, 1::2]
    return y


def through_a_reshape(net: Net, y: Tensor) -> Tensor:
    y.view(y.shape[0], 2, 3, *y.shape[2:])[:, 1].mul_(net.p[:3].view(1, 3, 1, 1))
    return y


def through_a_permutation(net: Net, y: Tensor) -> Tensor:
    y.permute(0, 2, 3, 1)[..., 0].zero_()
    return y


def without_grad(net: Net, y: Tensor) -> Tensor:
    with torch.no_grad():
        y.mul_(2)
    return y


def part_without_grad(net: Net, y: Tensor) -> Tensor:
    with torch.no_grad():
        y[:, :2].mul_(2)
    return y


def data_scaled(net: Net, y: Tensor) -> Tensor:
    y.data.mul_(2)
    return y


def data_set(net: Net, y: Tensor) -> Tensor:
    y.data = torch.ones(y.shape, dtype=y.dtype)
    return y


def parameter_put(net: Net, y: Tensor) -> Tensor:
    y[:, 1] = net.p[0]
    return y


def mask_put(net: Net, y: Tensor) -> Tensor:
    y[y < 0] = 0.5
    return y


def small_value_written(net: Net, y: Tensor) -> Tensor:
    z = y.mean((2, 3))
    z[:, 0] = 0
    z[:, 1:3].mul_(net.p[1:3])
    return y * z[..., None, None]


def small_value_through_views(net: Net, y: Tensor) -> Tensor:
    z = y.mean((2, 3))
    view = z[:, 0]
    z.view(-1).mul_(3)
    return y * z[..., None, None] + view.view(-1, 1, 1, 1)


def box_and_position(net: Net, y: Tensor) -> Tensor:
    y[:, 0, 2:5, 1:3] = 7.0
    y[0, :, 0, 0] = net.p
    return y


def copied_channel(net: Net, y: Tensor) -> Tensor:
    y[:, -1].copy_(y[:, 0])
    return y


def view_of_detached(net: Net, y: Tensor) -> Tensor:
    detached = y.detach()
    y[:, :2].add_(1)
    return y * detached.sum(1, keepdim=True)


def diagonal(net: Net, y: Tensor) -> Tensor:
    y.diagonal(dim1=2, dim2=3).zero_()
    return y


def column_filled(net: Net, y: Tensor) -> Tensor:
    y.transpose(2, 3)[:, :, 1].fill_(0.0)
    return y


def one_image_of_a_batch(net: Net, y: Tensor) -> Tensor:
    y[1].mul_(2)
    return y


def narrowed_twice(net: Net, y: Tensor) -> Tensor:
    rows = y.narrow(2, 4, 8)
    rows.narrow(1, 2, 2).neg_()
    rows.narrow(3, 0, 3).add_(rows[..., -3:])
    return y


def after_a_saving_reader(net: Net, y: Tensor) -> Tensor:
    before = y + 1
    y[:, 2:4] = 0
    return y * before


WRITES = [
    channel_set, channels_scaled, rows_set, base_written, overlapping_views, every_second, through_a_reshape,
    through_a_permutation, without_grad, part_without_grad, data_scaled, data_set, parameter_put, mask_put,
    small_value_written, small_value_through_views, box_and_position, copied_channel, view_of_detached, diagonal,
    column_filled, one_image_of_a_batch, narrowed_twice, after_a_saving_reader,
]  # fmt: skip


@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("budget", [None, 200 << 10], ids=["tiles", "budget"])
def test_a_write_through_a_view_is_seen_by_all(write, budget):
    torch.manual_seed(0)
    assert_exact(Net(write), (2, 3, 16, 20), engine=budget and asked(budget=budget))


def test_an_image_that_requires_grad_is_not_written_in_place():
    class Writes(nn.Module):
        def forward(self, x):
            x.mul_(2)
            return x.mean()

    x = torch.randn(1, 3, 16, 16, requires_grad=True)
    with pytest.raises(RuntimeError):
        Writes()(x)
    with pytest.raises(RecordingError, match="image that requires grad; clone"):
        TiledModule(Writes(), tiles=2)(x)


class Replaces(nn.Module):
    """Gives a map other values behind autograd's back, which leaves its gradient as it was."""

    def __init__(self, new: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.new = new
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y.data = self.new(y.detach())
        return y.square().mean((2, 3))


@pytest.mark.parametrize(
    "new", [lambda y: y * 2, lambda y: y.relu() + y.mean((2, 3), keepdim=True)], ids=["map", "with a mean"]
)
def test_values_are_replaced_and_gradients_stay(new: Callable[[Tensor], Tensor]) -> None:
    assert_exact(Replaces(new), (2, 3, 9, 8))


@pytest.mark.parametrize("new", [lambda y: y[:, :, 1:], lambda y: y.float()], ids=["shape", "type"])
def test_values_of_another_shape_or_type_are_refused(new: Callable[[Tensor], Tensor]) -> None:
    image = LazyImage.from_tensor(torch.zeros(1, 3, 9, 8, dtype=torch.float64), engine=asked((2, 2)))
    with pytest.raises((TypeError, RecordingError), match=r"\.data of shape"):
        Replaces(new).double()(image)


# Shapes that change in place -----------------------------------------------------------------------------------------


def used_afterwards(y: Tensor) -> Tensor:
    part = y[:, 1]
    y.unsqueeze_(1)
    part.mul_(2)
    return y.mean((3, 4)) + part.mean((1, 2))[:, None, None]


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "squeeze_": lambda y: y[:, :1].squeeze_(1),
    "unsqueeze_": lambda y: y.unsqueeze_(1).sin(),
    "transpose_": lambda y: y.transpose_(1, 2) * 2,
    "swapaxes_": lambda y: y.swapaxes_(2, 3),
    "t_ of a vector": lambda y: y.mean((2, 3)).t_(),
    "squeeze_ of a vector": lambda y: y.mean((2, 3), keepdim=True).squeeze_(),
    "used afterwards": used_afterwards,
}


class Reshaped(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.change = nn.Conv2d(3, 6, 3, padding=1), change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.conv(x))


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_change_in_place(name: str) -> None:
    """``transpose_`` gave other numbers in silence; quantiles use ``squeeze_`` inside."""
    assert_exact(Reshaped(SHAPES[name]), (2, 3, 12, 14))


def test_the_shape_of_an_image_is_not_changed_in_place() -> None:
    with pytest.raises(RecordingError, match=r"squeeze_\(\).*use squeeze\(\)"):
        LazyImage.from_tensor(torch.randn(1, 3, 8, 9)).squeeze_(0)
