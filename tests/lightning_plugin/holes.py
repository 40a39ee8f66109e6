"""A process with holes: what lies live between them keeps the C library from giving them back by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_plugin import memory
from lightning_plugin.memory import Heap, process_memory
from lightning_plugin.residency.homes import Homes, build

MIB = 2**20


class Made(dict[str, torch.Size]):
    """Weights that are made when they are asked for."""

    def __getitem__(self, name: str) -> Any:
        return torch.ones(super().__getitem__(name))


def build_from_weights_made_on_demand() -> None:
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(24)))
    before = process_memory()
    build(net, Homes(), "disk", Made((name, p.shape) for name, p in net.named_parameters()))  # type: ignore[arg-type]
    assert process_memory() < before + 40 * MIB, "parameters of 96 MiB lie in files"


def main() -> None:
    times: list[int] = []
    real = memory.malloc_trim()
    assert real is not None

    def trim(pad: int) -> int:
        times.append(pad)
        return int(real(pad))

    memory.malloc_trim = lambda: trim  # type: ignore[assignment]
    found = Heap(200 * MIB)
    found.trim(0)
    blocks = [torch.ones(MIB // 4) for _ in range(300)]  # the first that is freed has the others lie on the heap
    kept = [torch.ones(1000) for _ in range(300)]
    del blocks
    blocks = [torch.ones(MIB // 4) for _ in range(300)]
    before = process_memory()
    assert before > (found.baseline or 0) + 250 * MIB
    found.trim(300 * MIB)
    assert len(times) == 1, "what is live is no hole"
    blocks.clear()
    found.trim(0)
    assert process_memory() < before - 250 * MIB
    assert len(kept) == 300


if __name__ == "__main__":
    build_from_weights_made_on_demand()
    main()
