"""The memory that a run tells of."""

import torch

from wsi_trainer.fit.callbacks import process_peak


def test_the_peak_of_the_process_notices_an_allocation() -> None:
    before = process_peak()
    block = torch.ones(before // 4 + 50_000_000)  # four bytes each: more than was ever resident
    assert process_peak() > before and block.sum() > 0
