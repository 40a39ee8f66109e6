"""Heads: from the map of features of a whole slide to one vector for it.

Each head is built with the number of channels of the map: `AveragePooling(64)`. The vector it returns has
`out_channels` entries. They are written with the plain operators of PyTorch. Each takes the positions that count as a
second map: 1 where a position counts and 0 where not (`pool_over: tissue`); the vector is then that of a slide without
the other positions. The heads after `TopKPooling` are those of papers on bags of patches, of which each position of
the map is one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_plugin import materialize
from wsi_trainer.errors import UserError


class Pooling(nn.Module):
    """A map from (N, channels, h, w) to (N, out_channels).

    Attributes:
        branches: Vectors side by side in the one returned, one for each output of the task; 1 where they share one.
        wants_places: Whether `forward` and `scores` take the places of patches, as the batch has them, as `places`.
    """

    branches = 1
    wants_places = False

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.out_channels = channels

    @property
    def attends(self) -> bool:
        """True for a head with attention, which has `scores`."""
        return type(self).scores is not Pooling.scores

    def attach(self, outputs: int) -> None:
        """Hear the number of outputs of the task, before first use."""

    def forward(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def scores(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        """The logit of attention of each position, (N, branches, h, w).

        Their softmax over the positions is the share of each in the attention.
        """
        raise NotImplementedError(f"{type(self).__name__} has no attention")


class AveragePooling(Pooling):
    """The mean of each channel over the slide."""

    def forward(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        return _mean(features, counts)


class MaxPooling(Pooling):
    """The maximum of each channel over the slide; positions that share it share its gradient."""

    def forward(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        return lowered(features, counts).amax(dim=(2, 3))


class GeneralisedMeanPooling(Pooling):
    """The p-mean of each channel, (mean xᵖ)^(1/p): average for p = 1, maximum for p → ∞.

    Negative features count as 0.
    """

    def __init__(self, channels: int, p: float = 4.0, eps: float = 1e-4) -> None:
        """Build the head.

        Args:
            channels: Channels of the map.
            p: The exponent, at least 1.
            eps: Smallest feature; a map of zeros has no gradient without it.
        """
        super().__init__(channels)
        if p < 1:
            raise ValueError(f"p is {p}; the generalised mean needs p of at least 1")
        self.p = p
        self.eps = eps

    def forward(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        return _mean(features.clamp(min=self.eps) ** self.p, counts) ** (1.0 / self.p)


class AttentionPooling(Pooling):
    """A weighted mean over the slide, the weights from gated attention.

    They are the softmax of w·(tanh(Vh) ⊙ sigmoid(Uh)).
    """

    def __init__(self, channels: int, hidden: int = 32) -> None:
        """Build the head.

        Args:
            channels: Channels of the map.
            hidden: Channels of V and U.
        """
        super().__init__(channels)
        self.value = nn.Conv2d(channels, hidden, 1)
        self.gate = nn.Conv2d(channels, hidden, 1)
        self.score = nn.Conv2d(hidden, 1, 1)

    def scores(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        """The logit of attention of each position, (N, branches, h, w)."""
        return lowered(self.score(torch.tanh(self.value(features)) * torch.sigmoid(self.gate(features))), counts)

    def forward(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        return attended(features, self.scores(features, counts))


class ClassAttentionPooling(AttentionPooling):
    """Gated attention with a branch for each output of the task, as in CLAM with several branches.

    V and U are shared, each output has its own w, so its own weights over the slide and its own vector; the last
    layer gives each output its vector alone.
    """

    def attach(self, outputs: int) -> None:
        self.branches = outputs
        self.out_channels *= outputs
        self.score = nn.Conv2d(self.score.in_channels, outputs, 1)

    def forward(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        scores = self.scores(features, counts)
        return torch.cat([attended(features, scores[:, i : i + 1]) for i in range(self.branches)], dim=1)


class TopKPooling(Pooling):
    """The mean of the k largest values of each channel: a maximum that hears more than one position."""

    def __init__(self, channels: int, k: int = 16) -> None:
        """Build the head.

        Args:
            channels: Channels of the map.
            k: How many; all positions where there are fewer.
        """
        super().__init__(channels)
        if k < 1:
            raise ValueError(f"k is {k}; it must be at least 1")
        self.k = k

    def forward(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        flat = lowered(features, counts).flatten(2)
        largest = flat.topk(min(self.k, flat.shape[-1]), dim=-1).values
        if counts is None:
            return largest.mean(dim=-1)
        number = counts.sum(dim=(2, 3))[:, :, None]  # where fewer than k count, the rest are lowered values
        counted = torch.arange(largest.shape[-1], device=largest.device) < number
        return torch.where(counted, largest, torch.zeros_like(largest)).sum(dim=-1) / counted.sum(dim=-1)


def _mean(features: Tensor, counts: Tensor | None) -> Tensor:
    if counts is None:
        return features.mean(dim=(2, 3))
    return (features * counts).sum(dim=(2, 3)) / counts.sum(dim=(2, 3))


def lowered(features: Tensor, counts: Tensor | None) -> Tensor:
    """The features, far below all others where a position does not count.

    Not −∞, which has no difference from itself: half the lowest number there is does the same and stays a number.
    """
    if counts is None:
        return features
    return features.masked_fill(counts == 0, torch.finfo(features.dtype).min / 2)


def attended(features: Tensor, scores: Tensor) -> Tensor:
    """The mean of the features, weighted by the softmax of one map of scores."""
    weights = functional.softmax(scores.flatten(2), dim=-1)
    return (features.flatten(2) * weights).sum(dim=-1)


def _logits(shares: Tensor, features: Tensor) -> Tensor:
    """Shares of attention (N, positions) as logits, (N, 1, h, w); what is not above 0 has none."""
    logits = shares.clamp(min=torch.finfo(shares.dtype).tiny).log()
    return logits.unflatten(1, features.shape[2:])[:, None]


def as_tokens(features: Tensor) -> Tensor:
    """From (N, channels, h, w) to (N, positions, channels)."""
    # A bag lies along one axis, and a token can be put before it without holding it whole.
    line = features[..., 0] if features.shape[3] == 1 else features.flatten(2)
    return line.transpose(1, 2)


def refuse_counts(head: object, counts: Tensor | None) -> None:
    """Refuse a map of which only some positions count, for a head whose tokens stand in relation to each other."""
    if counts is not None:
        raise ValueError(
            f"model.head {type(head).__name__} is for bags of patches (data.patches, data.features), all of which "
            "count; leave out pool_over: tissue, or choose a head that pools"
        )


def needed(head: object, places: Tensor | None) -> Tensor:
    """The places of patches, without which a head has nothing to relate them by."""
    if places is None:
        raise UserError(
            f"model.head {type(head).__name__} needs to know where patches lie; it is for bags of patches "
            "(data.patches) and for features with coordinates (data.features)"
        )
    return materialize(places)


class MeanMLP(AveragePooling):
    """The mean over the slide of max(0, W h + b): what attention has to beat."""

    def __init__(self, channels: int, hidden: int = 512, dropout: float = 0.0) -> None:
        """Build the head.

        Args:
            channels: Channels of the map.
            hidden: Rows of W.
            dropout: Dropout of what is averaged.
        """
        super().__init__(channels)
        self.out_channels = hidden
        self.project = nn.Conv2d(channels, hidden, 1)
        self.drop = nn.Dropout(dropout)

    def forward(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        return super().forward(self.drop(functional.relu(self.project(features))), counts)


class DualStreamPooling(Pooling):
    """DSMIL's two streams, for each output of the task.

    The first scores each patch by itself, w·h; the patch with the highest score is the critical one, m. The second is
    a mean of V h over all patches, its weights the softmax of the products of queries, (Q h)·(Q hₘ). The vector of an
    output is that mean, and beside it the score of the critical patch: the last layer weighs the two, where the paper
    takes the half of each. Patches that share the highest score are critical together, in equal parts.
    """

    def __init__(self, channels: int, queries: int = 128) -> None:
        """Build the head.

        Args:
            channels: Channels of the map.
            queries: Entries of a query.
        """
        super().__init__(channels)
        self.score = nn.Conv2d(channels, 1, 1)
        self.query = nn.Conv2d(channels, queries, 1)
        self.value = nn.Conv2d(channels, channels, 1)
        self.out_channels = channels + 1

    def attach(self, outputs: int) -> None:
        self.branches = outputs
        self.out_channels *= outputs
        self.score = nn.Conv2d(self.score.in_channels, outputs, 1)

    def forward(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        values = self.value(features)
        streams = self._streams(features, counts)
        return torch.cat([part for one, of in streams for part in (attended(values, of), one.flatten(1))], dim=1)

    def scores(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        """The logit of attention of each position, (N, branches, h, w): the products of its query with the critical."""
        return torch.cat([alike for _, alike in self._streams(features, counts)], dim=1)

    def _streams(self, features: Tensor, counts: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        """For each output the score of the critical patch, and the logits of attention, (N, 1, h, w)."""
        scores, queries = lowered(self.score(features), counts), self.query(features)
        for branch in range(self.branches):
            own = scores[:, branch : branch + 1]
            highest = own.amax(dim=(2, 3), keepdim=True)
            critical = (own == highest).to(queries.dtype)
            middle = (queries * critical).sum(dim=(2, 3), keepdim=True) / critical.sum(dim=(2, 3), keepdim=True)
            yield highest, lowered((queries * middle).sum(dim=1, keepdim=True), counts)


class TransformerPooling(Pooling):
    """A class token that attends, with all patches, to all patches; it knows nothing of where they lie."""

    def __init__(self, channels: int, width: int = 512, heads: int = 8, layers: int = 2, dropout: float = 0.0) -> None:
        """Build the head.

        Args:
            channels: Channels of the map.
            width: Entries of a token, and of the vector.
            heads: Heads of the attention.
            layers: How many layers, normalised before attention and before their own network of `4 * width`.
            dropout: Dropout in the layers.
        """
        super().__init__(channels)
        if width % heads:
            raise ValueError(f"width is {width}; it must be a multiple of heads, {heads}")
        self.out_channels = width
        self.project = nn.Linear(channels, width)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        return self.layers(self._tokens(features, counts))[:, 0]

    def scores(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        """The logit of attention of each patch, (N, 1, h, w): what the class token gives it in the last layer, as the
        mean over the heads."""
        tokens = self._tokens(features, counts)
        *before, last = self.layers.layers
        for layer in before:
            tokens = layer(tokens)
        normed = last.norm1(tokens)
        shares = last.self_attn(normed[:, :1], normed, normed)[1]
        return _logits(shares[:, 0, 1:], features)

    def _tokens(self, features: Tensor, counts: Tensor | None) -> Tensor:
        refuse_counts(self, counts)
        tokens = self.project(as_tokens(features))
        return torch.cat([self.token.expand(len(tokens), -1, -1), tokens], dim=1)


class NystromAttention(nn.Module):
    """softmax(q k̃ᵀ) · pinv(softmax(q̃ k̃ᵀ)) · softmax(q̃ kᵀ) v, and a convolution of v along the tokens beside it.

    Landmarks q̃ and k̃ are means of tokens that follow each other. Tokens are filled up with zeros at their beginning to
    a multiple of the landmarks.
    """

    def __init__(self, width: int, heads: int, landmarks: int, kernel: int = 33, iterations: int = 6) -> None:
        """Build the layer.

        Args:
            width: Entries of a token.
            heads: Heads of the attention.
            landmarks: How many.
            kernel: Tokens that the convolution sees.
            iterations: Steps towards the pseudoinverse.
        """
        super().__init__()
        self.heads, self.landmarks, self.iterations = heads, landmarks, iterations
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.beside = nn.Conv2d(heads, heads, (kernel, 1), padding=(kernel // 2, 0), groups=heads, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down, middle, up, v = self._factors(x)
        found = down @ middle @ (up @ v) + self.beside(v)
        return self.out(found.transpose(1, 2).flatten(2))[:, -x.shape[1] :]

    def shares(self, x: Tensor) -> Tensor:
        """Shares of the tokens in the first one, (N, tokens), as the mean over the heads; some of the approximation are
        negative."""
        count = x.shape[1]
        down, middle, up, _ = self._factors(x)
        asked = down[:, :, -count : down.shape[2] - count + 1]
        return (asked @ middle @ up).mean(1)[:, 0, -count:]

    def _factors(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The three factors of the attention, (N, heads, tokens or landmarks, landmarks or tokens), and v."""
        x = functional.pad(x, (0, 0, -x.shape[1] % self.landmarks, 0))
        n, length, width = x.shape
        q, k, v = (t.view(n, length, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        q = q * (width // self.heads) ** -0.5
        few_q, few_k = (t.reshape(n, self.heads, self.landmarks, -1, t.shape[-1]).mean(3) for t in (q, k))
        down = torch.softmax(q @ few_k.transpose(-2, -1), -1)
        middle = torch.softmax(few_q @ few_k.transpose(-2, -1), -1)
        up = torch.softmax(few_q @ k.transpose(-2, -1), -1)
        return down, pseudoinverse(middle, self.iterations), up, v


def pseudoinverse(a: Tensor, iterations: int) -> Tensor:
    """The Moore-Penrose inverse, by an iteration of third order."""
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    z = a.transpose(-2, -1) / (a.abs().sum(-2).max() * a.abs().sum(-1).max())
    for _ in range(iterations):
        az = a @ z
        z = 0.25 * z @ (13 * identity - az @ (15 * identity - az @ (7 * identity - az)))
    return z


class TransMILPooling(Pooling):
    """TransMIL's class token.

    Patches are projected, and the first are repeated until they fill a square; a layer of Nyström attention, three
    convolutions of 7, 5 and 3 over the square beside the patches themselves, another layer, and the class token.
    Patches stand in the square in the order in which they come.
    """

    def __init__(
        self, channels: int, width: int = 512, heads: int = 8, landmarks: int = 256, dropout: float = 0.1
    ) -> None:
        """Build the head.

        Args:
            channels: Channels of the map.
            width: Entries of a token, and of the vector.
            heads: Heads of the attention.
            landmarks: Landmarks of the attention; the paper takes the half of width.
            dropout: Dropout of what attention returns.
        """
        super().__init__(channels)
        if width % heads:
            raise ValueError(f"width is {width}; it must be a multiple of heads, {heads}")
        self.out_channels = width
        self.project = nn.Linear(channels, width)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.attend = nn.ModuleList(NystromAttention(width, heads, landmarks) for _ in range(2))
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, k, padding=k // 2, groups=width) for k in (7, 5, 3))
        self.drop = nn.Dropout(dropout)

    def forward(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        x = self._tokens(features, counts)
        x = x + self.drop(self.attend[1](self.norms[1](x)))
        return self.norms[2](x[:, 0])

    def scores(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        """The logit of attention of each patch, (N, 1, h, w): what the class token gives it in the last layer, as the
        mean over the heads, with what it gives to its repetition."""
        tokens = self._tokens(features, counts)
        last = self.attend[1]
        assert isinstance(last, NystromAttention)
        shares = last.shares(self.norms[1](tokens))[:, 1:]
        count = features.shape[2] * features.shape[3]
        again = shares[:, count:]
        return _logits(shares[:, :count] + functional.pad(again, (0, count - again.shape[1])), features)

    def _tokens(self, features: Tensor, counts: Tensor | None) -> Tensor:
        """The class token and those of patches, as they enter the last layer."""
        refuse_counts(self, counts)
        x = functional.relu(self.project(as_tokens(features)))
        side = math.isqrt(x.shape[1] - 1) + 1
        token = self.token.expand(len(x), -1, -1)
        x = torch.cat([token, x, x[:, : side * side - x.shape[1]]], 1)
        x = x + self.drop(self.attend[0](self.norms[0](x)))
        return self._mixed(x, side)

    def _mixed(self, x: Tensor, side: int) -> Tensor:
        """The convolutions over the square; the class token passes."""
        square = x[:, 1:].transpose(1, 2).reshape(len(x), -1, side, side)
        made = square + sum(convolution(square) for convolution in self.convolutions)
        return torch.cat([x[:, :1], made.flatten(2).transpose(1, 2)], 1)
