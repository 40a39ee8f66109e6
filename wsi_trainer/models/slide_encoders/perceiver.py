"""PRISM's slide encoder: a Perceiver, whose latents ask the patches of a slide again and again."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from wsi_trainer.models.heads import Pooling, _logits, as_tokens, refuse_counts


class CrossAttention(nn.Module):
    """Attention of latents to patches, which are not normalised before."""

    def __init__(self, width: int, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.x_norm = nn.LayerNorm(width)
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_kv = nn.Linear(channels, 2 * width, bias=False)
        self.to_out = nn.Linear(width, width, bias=False)

    def apart(self, x: Tensor) -> Tensor:
        """From (N, tokens, width) to (N, heads, tokens, width of a head)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def keys_and_values(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        key, value = self.to_kv(patches).chunk(2, dim=-1)
        return self.apart(key), self.apart(value)

    def queries(self, latents: Tensor) -> Tensor:
        return self.apart(self.to_q(self.x_norm(latents)))

    def forward(self, latents: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found = functional.scaled_dot_product_attention(self.queries(latents), key, value)
        return self.to_out(found.transpose(1, 2).flatten(2))


class SelfAttention(nn.Module):
    """Attention of normalised latents to each other."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mha = nn.MultiheadAttention(width, heads, bias=False, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.mha(x, x, x, need_weights=False)[0]


class Gated(nn.Module):
    """Its first half times GELU of its second."""

    def forward(self, x: Tensor) -> Tensor:
        x, gate = x.chunk(2, dim=-1)
        return x * functional.gelu(gate)


class FeedForward(nn.Module):
    """Two layers on normalised latents, gated between."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        hidden = width * times
        self.net = nn.Sequential(nn.Linear(width, 2 * hidden), Gated(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.norm(x))


class Perceiver(nn.Module):
    """Latents that ask the patches, and each other, several times.

    The first two layers ask the patches by weights of their own, later ones by those of the second. The blocks in which
    latents ask each other are the same in all layers.
    """

    def __init__(
        self, channels: int, latents: int, width: int, depth: int, blocks: int, heads: int, cross_heads: int, times: int
    ) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(latents, width))
        asks = [
            nn.ModuleDict({"xattn": CrossAttention(width, channels, cross_heads), "ff": FeedForward(width, times)})
            for _ in range(min(depth, 2))
        ]
        shared = nn.ModuleList(
            nn.ModuleDict({"mhsa": SelfAttention(width, heads), "ff": FeedForward(width, times)}) for _ in range(blocks)
        )
        self.layers = nn.ModuleList(
            nn.ModuleDict({"xattn": asks[min(number, 1)], "tf": shared}) for number in range(depth)
        )

    def forward(self, patches: Tensor) -> Tensor:
        """The latents at the end, (N, latents, width)."""
        return self._asked(patches, len(self.layers))

    def shares(self, patches: Tensor) -> Tensor:
        """Shares of the patches in what the first latent asks last, (N, patches), as the mean over the heads."""
        before = self._asked(patches, len(self.layers) - 1)
        xattn = self.layers[-1]["xattn"]["xattn"]  # type: ignore[index]
        query, (key, _) = xattn.queries(before[:, :1]), xattn.keys_and_values(patches)
        scores = query * query.shape[-1] ** -0.5 @ key.transpose(-2, -1)
        return torch.softmax(scores, dim=-1).mean(dim=1)[:, 0]

    def _asked(self, patches: Tensor, times: int) -> Tensor:
        """The latents after so many layers."""
        x = self.latents.expand(len(patches), -1, -1)
        known: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        for layer in self.layers[:times]:
            xattn, ff = layer["xattn"]["xattn"], layer["xattn"]["ff"]  # type: ignore[index]
            if xattn not in known:
                known[xattn] = xattn.keys_and_values(patches)
            x = x + xattn(x, *known[xattn])
            x = x + ff(x)
            for block in layer["tf"]:  # type: ignore[index]
                x = x + block["mhsa"](x)
                x = x + block["ff"](x)
        return x


class Prism(Pooling):
    """PRISM: the first of the latents that have asked the patches, normalised."""

    def __init__(
        self,
        channels: int,
        width: int = 1280,
        latents: int = 512,
        depth: int = 8,
        blocks: int = 6,
        heads: int = 8,
        cross_heads: int = 1,
        times: int = 1,
    ) -> None:
        """Build the head.

        Args:
            channels: Channels of the map.
            width: Entries of a latent, and of the vector.
            latents: How many there are beside the first.
            depth: How many times they ask the patches.
            blocks: How many times they ask each other after each.
            heads: Heads of this attention.
            cross_heads: Heads of the attention to patches.
            times: Width of a layer inside, in widths.
        """
        super().__init__(channels)
        self.out_channels = width
        self.cls_norm = nn.LayerNorm(width)
        self.perceiver = Perceiver(channels, 1 + latents, width, depth, blocks, heads, cross_heads, times)

    def forward(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        refuse_counts(self, counts)
        return self.cls_norm(self.perceiver(as_tokens(features))[:, 0])

    def scores(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        """The logit of attention of each patch, (N, 1, h, w): what the first latent gives it when it asks last."""
        refuse_counts(self, counts)
        return _logits(self.perceiver.shares(as_tokens(features)), features)
