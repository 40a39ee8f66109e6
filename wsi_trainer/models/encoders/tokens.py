"""From the tokens of a patch to its vector."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class ClassAndMean(nn.Module):
    """A ViT whose vector of a patch is its class token, and beside it the mean of its patch tokens.

    Registers count for neither.
    """

    def __init__(self, trunk: nn.Module, before: int) -> None:
        """Keep the network.

        Args:
            trunk: Returns all tokens, (patches, tokens, width), the class token first.
            before: Tokens before those of the patch: the class token and the registers.
        """
        super().__init__()
        self.trunk = trunk
        self.before = before

    def forward(self, patches: Tensor) -> Tensor:
        tokens = self.trunk(patches)
        return torch.cat([tokens[:, 0], tokens[:, self.before :].mean(dim=1)], dim=-1)


class AttentionPooler(nn.Module):
    """One vector that asks all tokens of a patch by attention, as in CONCH."""

    def __init__(self, width: int, tokens: int, heads: int = 8) -> None:
        """Build the layers.

        Args:
            width: Entries of the vector.
            tokens: Entries of a token.
            heads: Heads of the attention.
        """
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, width))
        self.attn = nn.MultiheadAttention(width, heads, kdim=tokens, vdim=tokens, batch_first=True)
        self.ln_q = nn.LayerNorm(width)
        self.ln_k = nn.LayerNorm(tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        keys = self.ln_k(tokens)
        queries = self.ln_q(self.query).expand(tokens.shape[0], 1, -1)
        return self.attn(queries, keys, keys, need_weights=False)[0][:, 0]


class PlainAttentionPooler(nn.Module):
    """The same without biases, its keys and values made by one matrix, as in CONCH 1.5."""

    def __init__(self, width: int, tokens: int, heads: int = 8) -> None:
        """Build the layers.

        Args:
            width: Entries of the vector.
            tokens: Entries of a token.
            heads: Heads of the attention.
        """
        super().__init__()
        self.heads = heads
        self.query = nn.Parameter(torch.randn(1, width))
        self.ln_k = nn.LayerNorm(tokens)
        self.ln_q = nn.LayerNorm(width)
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_kv = nn.Linear(tokens, 2 * width, bias=False)
        self.to_out = nn.Linear(width, width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        query = self.to_q(self.ln_q(self.query)).expand(tokens.shape[0], 1, -1)
        key, value = self.to_kv(self.ln_k(tokens)).chunk(2, dim=-1)
        parts = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (query, key, value)]
        pooled = functional.scaled_dot_product_attention(*parts)
        return self.to_out(pooled.transpose(1, 2).flatten(2))[:, 0]


class Pooled(nn.Module):
    """A ViT whose tokens are pooled by attention, and normalised."""

    def __init__(self, trunk: nn.Module, pooler: nn.Module, width: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.attn_pool_contrast = pooler
        self.ln_contrast = nn.LayerNorm(width)

    def forward(self, patches: Tensor) -> Tensor:
        return self.ln_contrast(self.attn_pool_contrast(self.trunk(patches)))


class ClassToken(nn.Module):
    """A vision model of transformers whose vector of a patch is its class token."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk

    def forward(self, patches: Tensor) -> Tensor:
        return self.trunk(patches).last_hidden_state[:, 0]
