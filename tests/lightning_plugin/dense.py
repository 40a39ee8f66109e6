"""Random dense networks: what `infer` promises, drawn block by block."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

WIDTH = 6


class SqueezeExcitation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x.mean((2, 3))).sigmoid()[:, :, None, None]


class NormOfAll(nn.Module):
    """A LayerNorm over channels and space."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[1:])


class NormOfChannels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # type: ignore[no-any-return]


class SoftmaxOverSpace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.flatten(2).softmax(-1).view_as(x) * x[0, 0].numel()


class Attention(nn.Module):
    """Each position asks all those of a map that is four times smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.values = (nn.Conv2d(WIDTH, WIDTH, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        small = F.avg_pool2d(x, 4, ceil_mode=True)
        q, k, v = (
            layer(t).flatten(2).transpose(1, 2)
            for layer, t in ((self.queries, x), (self.keys, small), (self.values, small))
        )
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).view_as(x)


class AttentionInWindows(nn.Module):
    """Within squares of four by four, of the part of the map that has whole ones."""

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        inner = x[:, :, : h // 4 * 4, : w // 4 * 4]
        tokens = inner.reshape(n, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, c)
        seen = F.scaled_dot_product_attention(tokens, tokens, tokens)
        seen = seen.reshape(n, h // 4, w // 4, 4, 4, c).permute(0, 5, 1, 3, 2, 4).reshape(inner.shape)
        return x + F.pad(seen, (0, w - inner.shape[3], 0, h - inner.shape[2]))


def conv(**how: Any) -> nn.Module:
    return nn.Conv2d(WIDTH, WIDTH, 3, padding=1, **how)


BLOCKS = {
    "convolution": conv,
    "dilated": lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=2, dilation=2),
    "stride": lambda: conv(stride=2),
    "pool": lambda: nn.MaxPool2d(2, ceil_mode=True),
    "enlarge": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "relu": nn.ReLU,
    "batch": lambda: nn.BatchNorm2d(WIDTH),
    "group": lambda: nn.GroupNorm(2, WIDTH),
    "instance": lambda: nn.InstanceNorm2d(WIDTH, affine=True),
    "norm of all": NormOfAll,
    "norm of channels": NormOfChannels,
    "squeeze": SqueezeExcitation,
    "softmax": SoftmaxOverSpace,
    "attention": Attention,
    "windows": AttentionInWindows,
}


class Dense(nn.Module):
    """Blocks one after the other; the maps behind some of them are results."""

    def __init__(self, blocks: list[str], results: set[int]) -> None:
        super().__init__()
        self.names = blocks
        self.first = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(BLOCKS[name]() for name in blocks)
        self.results = results

    def forward(self, x: Tensor) -> list[Tensor]:
        x, found = self.first(x), []
        for place, block in enumerate(self.blocks):
            x = block(x)
            if place in self.results:
                found.append(x)
        return [*found, x]

    def __repr__(self) -> str:
        return f"Dense({self.names}, {self.results})"


@st.composite
def dense_networks(draw: st.DrawFn) -> tuple[Dense, Tensor]:
    """A network with its image."""
    blocks = draw(st.lists(st.sampled_from(sorted(BLOCKS)), min_size=2, max_size=7))
    results = draw(st.sets(st.integers(0, len(blocks) - 2), max_size=2))
    shape = draw(st.integers(1, 2)), 3, draw(st.integers(33, 70)), draw(st.integers(33, 70))
    torch.manual_seed(draw(st.integers(0, 9)))
    net = Dense(blocks, results).double().eval()
    for norm in (m for m in net.modules() if isinstance(m, nn.BatchNorm2d)):
        assert norm.running_var is not None
        norm.running_var.uniform_(0.5, 2)
    return net, torch.randn(shape, dtype=torch.float64)
