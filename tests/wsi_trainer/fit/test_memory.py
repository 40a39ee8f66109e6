"""The bytes that plain PyTorch holds, counted by hand on networks small enough for that."""

import torch
from torch import nn

from wsi_trainer.fit.callbacks import held_for_backward, process_peak
from wsi_trainer.io.display import format_bytes


def test_counts_the_image_and_what_each_layer_saves_once() -> None:
    image = torch.zeros(1, 3, 32, 32)
    convolution = nn.Conv2d(3, 8, 3, padding=1)
    assert held_for_backward(convolution, image) == image.nbytes  # it saves its input and its weight
    chain = nn.Sequential(convolution, nn.ReLU(), nn.Conv2d(8, 4, 1))
    # The ReLU's output is saved by the ReLU and by the second convolution, in one storage.
    assert held_for_backward(chain, image) == image.nbytes + 8 * 32 * 32 * 4


def test_grows_with_the_area() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    small = held_for_backward(network, torch.zeros(1, 3, 64, 64))
    assert held_for_backward(network, torch.zeros(1, 3, 128, 128)) == 4 * small


def test_the_peak_of_the_process_notices_an_allocation() -> None:
    before = process_peak()
    block = torch.ones(before // 4 + 50_000_000)  # four bytes each: more than was ever resident
    assert process_peak() > before and block.sum() > 0


def test_bytes_are_written_in_the_unit_that_reads_best() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 5 * 2**20, 2**41)] == [
        "0 B", "1023 B", "1.0 KiB", "5.0 MiB", "2.0 TiB",
    ]  # fmt: skip
