"""A training whose parameters exceed the budget, on bags of several sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.lightning_plugin.test_streamed import Encoder, parameter_bytes


class StreamedModule(pl.LightningModule):
    """Transformer blocks, a parameter that no step uses, and a buffer that each step writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.unused = Encoder(2), nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def training_step(self, bag: Tensor, index: int) -> Tensor:
        self.seen.add_(bag.shape[0])
        loss: Tensor = (self.net(bag) - 1).square().sum()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Bags(Dataset[Tensor]):
    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        row = self.rows[index]
        generator = torch.Generator().manual_seed(row)
        return torch.randn(3 + row % 3, 3, 16, 16, dtype=torch.float64, generator=generator)


def bags(rows: Sequence[int]) -> Any:
    return DataLoader(Bags(rows), batch_size=None)


def tight_budget(module: nn.Module) -> int:
    """Room for the parameters of a float32 module in float64, and not for their gradients and AdamW's states."""
    return int(1.3 * 2 * parameter_bytes(module))
