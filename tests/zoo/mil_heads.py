"""Heads that pool all positions of a map into one vector, as multiple-instance learning does with patches.

Each is written on the bag of positions, (N, positions, channels), the way such code looks in papers.
Smallest side: 1; 5 with ``Moments`` (a standard deviation needs two positions).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .entry import ZooEntry
from .widths import scaled


def bag(features: Tensor) -> Tensor:
    """(N, C, H, W) to (N, positions, C)."""
    return features.flatten(2).transpose(1, 2)


class GatedAttention(nn.Module):
    """One attention distribution over the positions."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        hidden = max(2, channels // 2)
        self.v = nn.Sequential(nn.Linear(channels, hidden), nn.Tanh())
        self.u = nn.Sequential(nn.Linear(channels, hidden), nn.Sigmoid())
        self.w = nn.Linear(hidden, 1)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        h = bag(features)
        a = self.w(self.v(h) * self.u(h))
        a = torch.softmax(a.transpose(1, 2), dim=-1)
        return self.fc(torch.bmm(a, h).squeeze(1))


class ClassAttention(nn.Module):
    """CLAM: an attention distribution and a classifier of its own for each class, on projected features."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.project = nn.Sequential(nn.Linear(channels, channels), nn.ReLU())
        self.attention_a = nn.Linear(channels, channels)
        self.attention_b = nn.Linear(channels, channels)
        self.attention_c = nn.Linear(channels, num_classes)
        self.classifiers = nn.ModuleList(nn.Linear(channels, 1) for _ in range(num_classes))

    def forward(self, features: Tensor) -> Tensor:
        h = self.project(bag(features))
        a = self.attention_c(torch.tanh(self.attention_a(h)).mul(torch.sigmoid(self.attention_b(h))))
        a = F.softmax(torch.transpose(a, 1, 2), dim=2)
        m = torch.matmul(a, h)
        logits = m.new_empty(m.size(0), len(self.classifiers))
        for c, classifier in enumerate(self.classifiers):
            logits[:, c] = classifier(m[:, c]).squeeze(-1)
        return logits


class QueryAttention(nn.Module):
    """Learned queries, several heads: cross-attention whose keys and values are the positions."""

    def __init__(self, channels: int, num_classes: int, queries: int = 3, heads: int = 2) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(queries, channels) / math.sqrt(channels))
        self.norm = nn.LayerNorm(channels)
        self.to_key_value = nn.Linear(channels, 2 * channels)
        self.heads = heads
        self.fc = nn.Linear(queries * channels, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        batch, channels, height, width = features.shape
        h = self.norm(bag(features))
        k, v = self.to_key_value(h).chunk(2, dim=-1)
        k = k.reshape(batch, height * width, self.heads, -1).permute(0, 2, 3, 1)
        v = v.reshape(batch, height * width, self.heads, -1).permute(0, 2, 1, 3)
        q = self.queries.view(-1, self.heads, channels // self.heads).permute(1, 0, 2)
        weights = ((q @ k) / math.sqrt(channels // self.heads)).softmax(dim=-1)
        pooled = (weights @ v).permute(0, 2, 1, 3).reshape(batch, -1)
        return self.fc(pooled)


class TopK(nn.Module):
    """Scores every position, then averages each class's best ones."""

    def __init__(self, channels: int, num_classes: int, k: int = 5) -> None:
        super().__init__()
        self.score = nn.Conv2d(channels, num_classes, 1)
        self.k = k

    def forward(self, features: Tensor) -> Tensor:
        scores = self.score(features).flatten(2)
        k = min(self.k, scores.size(2))
        return scores.topk(k, dim=2)[0].mean(dim=2)


class GeneralisedMean(nn.Module):
    """Between the mean (p = 1) and the maximum (p = infinity); the power is learned."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(1) * 3)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        powered = features.clamp(min=1e-6).pow(self.p)
        pooled = F.avg_pool2d(powered, (features.size(-2), features.size(-1))).pow(1.0 / self.p)
        return self.fc(pooled.flatten(1))


class Maximum(nn.Module):
    """The maximum of the scores: one position takes each class's whole gradient."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.score = nn.Linear(channels, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        scores, _ = self.score(bag(features)).max(dim=1)
        return scores


class LogSumExp(nn.Module):
    """A smooth maximum of the scores, of sharpness ``r``."""

    def __init__(self, channels: int, num_classes: int, r: float = 4.0) -> None:
        super().__init__()
        self.score = nn.Conv2d(channels, num_classes, 1)
        self.r = r

    def forward(self, features: Tensor) -> Tensor:
        scores = self.score(features).flatten(start_dim=2)
        return (torch.logsumexp(self.r * scores, dim=-1) - math.log(scores.shape[-1])) / self.r


class Moments(nn.Module):
    """The mean, the maximum and the standard deviation side by side."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * channels, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        flat = features.view(*features.shape[:2], -1)
        return self.fc(torch.cat([flat.mean(-1), flat.amax(-1), flat.std(-1)], dim=1))


class CriticalInstance(nn.Module):
    """DSMIL: the highest-scoring position of each class asks how alike all are, which weighs their mean."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.score = nn.Linear(channels, num_classes)
        self.query = nn.Linear(channels, channels)
        self.value = nn.Linear(channels, channels)
        self.fc = nn.Conv1d(num_classes, num_classes, kernel_size=channels)

    def forward(self, features: Tensor) -> Tensor:
        h = bag(features)
        scores = self.score(h)
        best, index = scores.max(dim=1)
        critical = torch.gather(h, 1, index.unsqueeze(-1).expand(-1, -1, h.shape[-1]))
        attention = torch.matmul(self.query(h), self.query(critical).transpose(1, 2))
        attention = torch.softmax(attention / math.sqrt(h.shape[-1]), dim=1)
        pooled = torch.matmul(attention.transpose(1, 2), self.value(h))
        return 0.5 * (self.fc(pooled).squeeze(-1) + best)


class MILNet(nn.Module):
    """A small trunk at stride 4, then one of the heads."""

    def __init__(
        self,
        head: Callable[[int, int], nn.Module],
        *,
        in_channels: int = 3,
        num_classes: int = 2,
        width_mult: float = 1.0,
    ) -> None:
        super().__init__()
        c1, c2 = scaled(64, width_mult), scaled(128, width_mult, divisor=2)
        self.conv1 = nn.Conv2d(in_channels, c1, 5, stride=2, padding=2)
        self.conv2 = nn.Conv2d(c1, c2, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(c2)
        self.head = head(c2, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x), inplace=True)
        x = F.softplus(self.norm(self.conv2(x)))
        return self.head(x)


HEADS: dict[str, Callable[[int, int], nn.Module]] = {
    "mil_gated_attention": GatedAttention,
    "mil_class_attention": ClassAttention,
    "mil_query_attention": QueryAttention,
    "mil_top_k": TopK,
    "mil_generalised_mean": GeneralisedMean,
    "mil_max": Maximum,
    "mil_log_sum_exp": LogSumExp,
    "mil_moments": Moments,
    "mil_critical_instance": CriticalInstance,
}

ENTRIES = tuple(
    ZooEntry(
        name,
        partial(MILNet, head, num_classes=3, width_mult=1 / 16),
        (2, 3, 71, 61),
        False,
        partial(MILNet, head),
        min_size=5 if head is Moments else 1,
    )
    for name, head in HEADS.items()
)
