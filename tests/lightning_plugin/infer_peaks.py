"""The memory of processes that run `infer` on networks of others: `python -m tests.lightning_plugin.infer_peaks`.

Each network has a process of its own, forked from one that has imported all libraries and computed nothing. It runs
`infer` twice: the first run leaves the plan and what Python keeps of it. The process is idle then, and gives free
memory back to the system. What the second run takes is the process's peak, which the kernel notes, less the memory of
the idle process, but for the network's tensors, which a budget counts. A further run is judged by the books of
PyTorch's allocator.
"""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_plugin import infer
from lightning_plugin.private import tree_leaves
from tests.lightning_plugin.outside import account, standing
from tests.lightning_plugin.planner.peaks import CLEAR, of_status
from tests.lightning_plugin.test_infer_networks import NETWORKS, Dense, like, under_budget


def measure(dense: Dense, sender: Any) -> None:
    torch.set_num_threads(1)
    net, x = dense.build(), dense.image()
    with torch.no_grad():
        results = like([t for t in tree_leaves(net(x)) if isinstance(t, Tensor)])
    module, budget = under_budget(net, x, dense.sinks(results))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    idle = of_status("VmRSS") - sum(t.untyped_storage().nbytes() for t in standing(net))
    CLEAR.write_text("5")
    infer(module, x, dense.sinks(results))
    over = of_status("VmHWM") - idle
    held = account(lambda: infer(module, x, dense.sinks(results)), net).held
    sender.send({"network": dense.label, "budget": budget, "over_baseline": over, "held": held})


def peaks(labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return the budget of each network, what its process took, and what tensors took by the allocator's books."""
    import segmentation_models_pytorch  # noqa: F401
    import timm  # noqa: F401
    import transformers  # noqa: F401

    fork, found = multiprocessing.get_context("fork"), []
    for dense in NETWORKS:
        if not labels or dense.label in labels:
            receiver, sender = fork.Pipe(duplex=False)
            process = fork.Process(target=measure, args=(dense, sender))
            process.start()
            sender.close()
            found.append(receiver.recv())
            process.join()
    return found


if __name__ == "__main__":
    import tests.torchvision_stub  # noqa: F401

    print(json.dumps(peaks(sys.argv[1:])))
