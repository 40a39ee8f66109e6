"""Complex maps and complex vectors: values, types and gradients are plain PyTorch's, in tiles and in segments that are
kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_plugin import LazyImage, TiledModule, check, materialize
from lightning_plugin.residency.disk import flat_bytes
from tests.exactness import asked, assert_exact
from tests.lightning_plugin.rules.helpers import recorded_kinds
from tests.sampling import sampled

SPACE = (2, 3)
SHAPE = (2, 3, 12, 14)
#: Grids, and a budget under which all is kept.
WAYS: dict[str, dict[str, Any]] = {"tiles": {"tiles": (2, 3)}, "kept": {"budget": "64MiB"}}


@pytest.fixture(autouse=True)
def discarded_parts_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Casting complex values to real")
        yield


class Complex(nn.Module):
    """A complex map, and a function of it and of the module, which has complex parameters."""

    def __init__(self, function: Callable[[Tensor, Complex], Any]) -> None:
        super().__init__()
        self.parts = nn.Conv2d(3, 8, 3, padding=1)
        self.conv = nn.Conv2d(4, 4, 3, padding=1, dtype=torch.complex128)
        self.linear = nn.Linear(4, 5, dtype=torch.complex128)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        real, imag = self.parts(x).chunk(2, 1)
        return self.function(torch.complex(real, imag), self)


def gram(z: Tensor) -> Tensor:
    return torch.einsum("nchw,ndhw->ncd", z, z.conj())


def best(z: Tensor, net: Complex) -> Tensor:
    flat = z.flatten(2)
    return flat.gather(2, flat.abs().argmax(2, keepdim=True))


def scaled_in_place(z: Tensor, net: Complex) -> Tensor:
    z = net.conv(z)
    z.mul_(2j)
    return z.mean(SPACE)


def imaginary_part_written(z: Tensor, net: Complex) -> Tensor:
    z = net.conv(z)
    z.imag.mul_(3)
    return z.mean(SPACE) + z.real.amax(SPACE)


def conjugate_written(z: Tensor, net: Complex) -> Tensor:
    z = net.conv(z)
    z.conj().add_(2 + 1j)
    return z.sum(SPACE)


#: Dimensions of reductions, and whether they are kept.
REDUCED = {
    "space": (SPACE, False), "a batch": ((0, 2, 3), True), "rows": ((3,), False), "an image": ((1, 2, 3), True),
    "channels": ((1,), False), "all": ((0, 1, 2, 3), False),
}  # fmt: skip
MOMENTS = (torch.sum, torch.mean, torch.var, torch.std, torch.var_mean, torch.std_mean)
ORDERS = (0.5, 1, 2, 3, float("inf"), -1)


def moments(what: str) -> Callable[[Tensor, Complex], Any]:
    dims, keep = REDUCED[what]
    return lambda z, net: [moment(z, dims, keepdim=keep) for moment in MOMENTS]


def norms(what: str) -> Callable[[Tensor, Complex], Any]:
    dims, keep = REDUCED[what]
    return lambda z, net: [torch.linalg.vector_norm(z, order, dims, keep) for order in ORDERS]


def modes(spectrum: Tensor, size: tuple[int, ...]) -> Tensor:
    """The low frequencies, as Fourier neural operators keep them."""
    kept = torch.zeros_like(spectrum)
    kept[:, :, :3, :4] = spectrum[:, :, :3, :4] * (1 - 0.5j)
    kept[:, :, -3:, :4] = spectrum[:, :, -3:, :4] * 2
    return torch.fft.irfft2(kept, s=size)


def slices_written(z: Tensor, net: Complex) -> Tensor:
    z = z * 1
    z[:, 1] = z[:, 0] * 1j
    z.select(-1, 2).mul_(0.5)
    z[..., 4:] *= 2
    return z


OTHERS: dict[str, Callable[[Tensor, Complex], Any]] = {
    "norm": lambda z, net: z.norm(),
    "normalize": lambda z, net: F.normalize(z.flatten(2), dim=-1),
    "logsumexp": lambda z, net: z.logsumexp(SPACE),
    "modulus of a mean": lambda z, net: z.mean(SPACE).abs(),
    "angle of a mean": lambda z, net: z.mean(SPACE).angle(),
    "gram": lambda z, net: gram(z),
    "eigenvalues": lambda z, net: torch.linalg.eigh(gram(z)).eigenvalues,
    "a linear layer on a vector": lambda z, net: net.linear(z.mean(SPACE)),
    "a linear layer": lambda z, net: net.linear(z.movedim(1, -1)),
    "a convolution": lambda z, net: net.conv(z),
    "whitened": lambda z, net: z * torch.rsqrt(z.var(SPACE, keepdim=True) + 1e-3),
    "centred": lambda z, net: z - z.mean(SPACE, keepdim=True),
    "real": lambda z, net: z.real.relu().mean(SPACE),
    "imag": lambda z, net: z.imag.std(SPACE),
    "imag of a conjugate": lambda z, net: z.conj().imag.tanh(),
    "conjugate": lambda z, net: (z * z.conj()).real,
    "pairs": lambda z, net: torch.view_as_complex(torch.view_as_real(z) * 2).mean(SPACE),
    "polar": lambda z, net: torch.polar(z.abs(), 2 * z.angle()),
    "the largest": best,
    "cumsum": lambda z, net: z.cumsum(2),
    "circular": lambda z, net: F.pad(z, (1, 1, 1, 1), mode="circular"),
    "l1": lambda z, net: F.l1_loss(z, torch.zeros_like(z)),
    "fft": lambda z, net: torch.fft.ifft2(torch.fft.fft2(z) * (1 + 1j)).mean(SPACE),
    "modes of a spectrum": lambda z, net: modes(torch.fft.rfft2(z.real), z.shape[-2:]),
    "in place": scaled_in_place,
    "slices in place": slices_written,
    "a part in place": imaginary_part_written,
    "a conjugate in place": conjugate_written,
}
USES = (
    {f"moments of {what}": moments(what) for what in REDUCED}
    | {f"norms of {what}": norms(what) for what in REDUCED}
    | OTHERS
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), sampled(USES, WAYS, every=2))
def test_what_plain_pytorch_makes_of_a_complex_map(name: str, way: str) -> None:
    net = Complex(USES[name])
    assert_exact(net, SHAPE, engine=asked(**WAYS[way]))


def test_a_complex_network_is_tiled() -> None:
    def everyday(z: Tensor, net: Complex) -> Tensor:
        z = net.conv(z)
        z = z * torch.rsqrt(z.var((0, 2, 3), keepdim=True))
        z = torch.complex(z.real.relu(), z.imag.relu()) * z.conj()
        return torch.cat([z.abs(), torch.polar(z.abs(), z.angle()).imag, torch.view_as_real(z)[..., 1]], 1)

    kinds = recorded_kinds(Complex(everyday).double(), SHAPE)
    assert not kinds["Barrier"] and not kinds["Gather"], kinds


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("use", ["mean", "var", "norm"])
def test_a_complex_vector_has_its_gradient(use: str, way: str) -> None:
    pools = {"mean": lambda z, net: z.mean(SPACE), "var": lambda z, net: z.var(SPACE), "norm": lambda z, net: z.norm()}
    net = Complex(pools[use]).double()
    x = torch.randn(SHAPE, dtype=torch.float64)
    found, expected = TiledModule(net, **WAYS[way])(x), net(x)
    assert found.requires_grad and found.dtype == expected.dtype


class OfComplexImages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 4, 3, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean(2)


def test_complex_sequences_are_images_and_sums_lose_no_digits() -> None:
    """A complex tensor of three dimensions is no map of classes. Sums of many tiles are added up in complex128."""
    torch.manual_seed(0)
    net, x = OfComplexImages(), torch.randn(1, 3, 4000, dtype=torch.complex64) + 100
    tiled = TiledModule(net, tiles=(200,))
    tiled(x).abs().sum().backward()
    assert tiled.plan is not None
    found = [p.grad for p in net.parameters()]
    net.zero_grad()
    wide = OfComplexImages()
    wide.conv = nn.Conv1d(3, 4, 3, dtype=torch.complex128)
    wide.load_state_dict(net.state_dict())
    wide(x.to(torch.complex128)).abs().sum().backward()
    for a, e in zip(found, wide.parameters(), strict=True):
        assert a is not None and e.grad is not None
        assert (a - e.grad).abs().max() < 1e-6 * e.grad.abs().max()


def test_the_gradient_of_a_complex_image() -> None:
    x = torch.randn(1, 4, 12, 14, dtype=torch.complex128, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    net = nn.Conv2d(4, 4, 3, dtype=torch.complex128)
    net(x).var(SPACE).sum().backward()
    TiledModule(net, tiles=(2, 3))(LazyImage.from_tensor(twin)).var(SPACE).sum().backward()
    assert x.grad is not None and twin.grad is not None
    assert (x.grad - twin.grad).abs().max() < 1e-12


def test_conjugates_that_are_not_computed_yet() -> None:
    """Images, targets and weights may have the conjugate bit or the negative bit."""
    z = torch.randn(1, 4, 12, 14, dtype=torch.complex128)
    for x in (z.conj(), z.conj().imag, z.mT.conj().mT):
        expected = (x * x.conj()).mean(SPACE) + x.flatten(2)[..., 3]
        image = LazyImage.from_tensor(x, engine=asked(tiles=(2, 3)))
        found = materialize((image * x.conj()).mean(SPACE) + image.flatten(2)[..., 3])
        assert (found - expected).abs().max() < 1e-12


def test_conjugates_are_written_to_files_as_they_read() -> None:
    z = torch.randn(3, 4, dtype=torch.complex128)
    for t in (z.conj(), torch._neg_view(z.abs())):
        assert torch.equal(flat_bytes(t), flat_bytes(t.clone()))


def test_a_conjugate_is_searched_for_nan() -> None:
    engine = asked(tiles=(2, 3))
    image = LazyImage.from_tensor(torch.randn(1, 4, 12, 14, dtype=torch.complex128), engine=engine)
    mean = nn.Conv2d(4, 4, 1, dtype=torch.complex128)(image).mean(SPACE).conj()
    (mean / (mean - mean)).abs().sum().backward()
    assert engine.non_finite is not None


def test_check_compares_complex_networks() -> None:
    class Magnitude(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)
            self.mix = nn.Conv2d(2, 2, 1, dtype=torch.complex64)

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(torch.complex(*self.conv(x).chunk(2, 1))).mean(SPACE)

    report = check(Magnitude(), torch.randn(1, 3, 24, 24))
    assert report.exact and "output" in report.errors
