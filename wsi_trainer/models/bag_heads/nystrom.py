"""Attention through landmarks (Xiong et al., 2021)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


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
        count = x.shape[1]
        x = functional.pad(x, (0, 0, -count % self.landmarks, 0))
        n, length, width = x.shape
        q, k, v = (t.view(n, length, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        q = q * (width // self.heads) ** -0.5
        few_q, few_k = (t.reshape(n, self.heads, self.landmarks, -1, t.shape[-1]).mean(3) for t in (q, k))
        down = torch.softmax(q @ few_k.transpose(-2, -1), -1)
        middle = torch.softmax(few_q @ few_k.transpose(-2, -1), -1)
        up = torch.softmax(few_q @ k.transpose(-2, -1), -1)
        found = down @ pseudoinverse(middle, self.iterations) @ (up @ v) + self.beside(v)
        return self.out(found.transpose(1, 2).reshape(n, length, width))[:, -count:]


def pseudoinverse(a: Tensor, iterations: int) -> Tensor:
    """The Moore-Penrose inverse, by an iteration of third order."""
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    z = a.transpose(-2, -1) / (a.abs().sum(-2).max() * a.abs().sum(-1).max())
    for _ in range(iterations):
        az = a @ z
        z = 0.25 * z @ (13 * identity - az @ (15 * identity - az @ (7 * identity - az)))
    return z
