"""Random networks on patches, batches, windows and tokens, as users write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.lightning_plugin.networks import AnyPlan, plans

Cut = Callable[[Tensor, int], Tensor]


def by_view(x: Tensor, p: int) -> Tensor:
    n, c, h, w = x.shape
    return x.view(n, c, h // p, p, w // p, p).permute(0, 2, 4, 1, 3, 5).reshape(-1, c, p, p)


def by_unfold(x: Tensor, p: int) -> Tensor:
    return x.unfold(2, p, p).unfold(3, p, p).permute(0, 2, 3, 1, 4, 5).reshape(-1, x.shape[1], p, p)


def by_columns(x: Tensor, p: int) -> Tensor:
    return F.unfold(x, p, stride=p).transpose(1, 2).reshape(-1, x.shape[1], p, p)


def by_overlap(x: Tensor, p: int) -> Tensor:
    step = max(1, p // 2)
    return x.unfold(2, p, step).unfold(3, p, step).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)


def by_slices(x: Tensor, p: int) -> Tensor:
    rows, columns = range(0, x.shape[2] - p + 1, p), range(0, x.shape[3] - p + 1, p)
    return torch.cat([x[:, :, a : a + p, b : b + p] for a in rows for b in columns])


def by_stack(x: Tensor, p: int) -> Tensor:
    rows, columns = range(0, x.shape[2] - p + 1, p), range(0, x.shape[3] - p + 1, p)
    return torch.stack([x[i, :, a : a + p, b : b + p] for i in range(len(x)) for a in rows for b in columns])


def by_numbers(x: Tensor, p: int) -> Tensor:
    patches = by_view(x, p)
    count = patches.shape[0]
    return patches[torch.tensor([(5 * i + 2) % count for i in range(count - count // 3)])]


def by_mask(x: Tensor, p: int) -> Tensor:
    patches = by_view(x, p)
    return patches[torch.arange(patches.shape[0]) % 3 != 1]


def whole(x: Tensor, p: int) -> Tensor:
    return x


CUTS: tuple[Cut, ...] = (
    whole, by_view, by_unfold, by_columns, by_overlap, by_slices, by_stack, by_numbers, by_mask,
)  # fmt: skip


class Attention(nn.Module):
    """A block of attention in one of the forms in which it is written; (N, T, C) in and out."""

    def __init__(self, form: str, dim: int, heads: int, token: bool) -> None:
        super().__init__()
        self.form, self.heads = form, heads
        self.norm = nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.multihead = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(dim, heads, 2 * dim, 0.0, batch_first=True, norm_first=token)

    def attend(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        if self.form in ("multihead", "weights"):
            found: Tensor = self.multihead(x, x, x, need_weights=self.form == "weights")[0]
            return found
        q, k, v = self.qkv(x).reshape(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        far = (torch.arange(t)[:, None] - torch.arange(t)[None]).abs()
        if self.form == "by hand":
            y = torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, -1) @ v
        elif self.form == "linear":
            y = q.softmax(-1) @ (k.softmax(-2).transpose(-2, -1) @ v)
        elif self.form == "causal":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.form == "mask":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=far < 5)
        elif self.form == "bias":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=-0.1 * far.to(x.dtype))
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        joined: Tensor = self.out(y.transpose(1, 2).reshape(n, t, c))
        return joined

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "layer":
            made: Tensor = self.layer(x)
            return made
        x = x + self.attend(self.norm(x))
        return x + self.mlp(x)  # type: ignore[no-any-return]


FORMS = ("fused", "by hand", "multihead", "weights", "layer", "causal", "mask", "bias", "linear")
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "none": lambda c: nn.Identity(),
    "batch": nn.BatchNorm2d,
    "group": lambda c: nn.GroupNorm(2, c),
    "instance": lambda c: nn.InstanceNorm2d(c, affine=True),
}


class Encoder(nn.Module):
    """Convolutions, then perhaps tokens: a vector for each image or patch."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        width = 4
        self.drawn = drawn
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), NORMS[drawn.norm](width), nn.ReLU())
        self.embed = nn.Conv2d(width, width, 2, 2)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.place = nn.Parameter(0.1 * torch.randn(1, 200, width))
        self.blocks = nn.Sequential(*(Attention(form, width, 2, drawn.token) for form in drawn.forms))
        self.pool = nn.AdaptiveAvgPool2d(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(self.stem(x))
        if not self.drawn.forms:
            return self.pool(x).flatten(1)  # type: ignore[no-any-return]
        x = x.flatten(2).transpose(1, 2)
        if self.drawn.token:
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        x = self.blocks(x + self.place[:, : x.shape[1]])
        return x[:, 0] if self.drawn.token else x.mean(1)


class Bag(nn.Module):
    """An encoder of whatever an image is cut into, attention over what it found, and a head."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.drawn = drawn
        self.encoder = Encoder(drawn)
        self.weight = nn.Linear(4, 1)
        self.over = Attention(drawn.over, 4, 2, True) if drawn.over else nn.Identity()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.drawn.cut(x, self.drawn.side)
        if self.drawn.chunk:
            found = torch.cat([self.encoder(part) for part in patches.split(self.drawn.chunk)])
        else:
            found = self.encoder(patches)
        if self.drawn.over:
            found = self.over(found.unsqueeze(0)).squeeze(0)
        return self.head((torch.softmax(self.weight(found), 0) * found).sum(0, keepdim=True))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Drawn:
    """One example: how an image is cut, what becomes of the pieces, and the plan."""

    cut: Cut
    side: int
    rows: int
    columns: int
    batch: int
    norm: str
    forms: tuple[str, ...]
    token: bool
    over: str
    chunk: int
    train: bool
    plan: AnyPlan
    seed: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.batch, 3, self.rows * self.side, self.columns * self.side)

    def __repr__(self) -> str:
        told: dict[str, Any] = {k: v for k, v in vars(self).items() if k != "cut"}
        return f"{self.cut.__name__} {told}"


def draws() -> st.SearchStrategy[Drawn]:
    return st.builds(
        Drawn,
        cut=st.sampled_from(CUTS),
        side=st.sampled_from([4, 6, 7, 8]),
        rows=st.integers(1, 3),
        columns=st.integers(1, 3),
        batch=st.sampled_from([1, 1, 2, 3, 5]),
        norm=st.sampled_from(list(NORMS)),
        forms=st.lists(st.sampled_from(FORMS), max_size=2).map(tuple),
        token=st.booleans(),
        over=st.sampled_from(["", "", *FORMS]),
        chunk=st.sampled_from([0, 0, 0, 2, 3]),
        train=st.booleans(),
        plan=plans(),
        seed=st.integers(0, 1000),
    )
