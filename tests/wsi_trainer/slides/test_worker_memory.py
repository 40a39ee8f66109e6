"""Worker processes of a DataLoader read for epochs and do not grow."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

_SCRIPT = """
import json, sys
from pathlib import Path
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from lightning_plugin import Box
from wsi_trainer.slide import Slide
from wsi_trainer.slide.views import Image

torch.set_num_threads(1)
PER_ITEM = 10

def peak():
    # Not getrusage: its peak survives exec and would be that of the test's own process.
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024

class Reads(Dataset):
    def __init__(self, source, items):
        self.source, self.items = source, items
    def __len__(self):
        return self.items
    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        total = 0
        for y, x in rng.integers(0, (700, 500), (PER_ITEM, 2)):
            total += int(self.source.read(Box((int(y), int(x)), (int(y) + 300, int(x) + 300))).sum())
        return torch.utils.data.get_worker_info().id, peak(), total

def main():
    path, method, reads, epochs = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    source = Image(Slide.open(path), cache=2 << 20, threads=2)
    source.read(Box((0, 0), (300, 300)))  # a forked worker finds threads that are not there, and open files
    items = reads // epochs // PER_ITEM
    loader = DataLoader(Reads(source, items), batch_size=None, num_workers=2, persistent_workers=True,
                        multiprocessing_context=method)
    after, sums = [], []
    for _ in range(epochs):
        peaks, total = {}, 0
        for worker, now, one in loader:
            peaks[int(worker)] = float(now)
            total += int(one)
        after.append(peaks)
        sums.append(total)
    same = len(set(sums)) == 1
    print(json.dumps({"first": after[0], "last": after[-1], "same": same, "reads": items * PER_ITEM * epochs}))

if __name__ == "__main__":
    main()
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to read the peak of memory from")
@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("slide", "fork"),
        # Each spawned process imports PyTorch first, which takes longer than what is tested.
        pytest.param("slide", "spawn", marks=pytest.mark.full),
        pytest.param("store", "fork", marks=pytest.mark.full),
        pytest.param("store", "spawn", marks=pytest.mark.full),
    ],
)
def test_memory_of_workers_is_flat_over_epochs(
    slide: Path,
    store: Path,
    kind: str,
    method: str,
    tmp_path: Path,
    count: Callable[..., int],
    record_result: Callable[..., None],
) -> None:
    script = tmp_path / "reads.py"
    script.write_text(_SCRIPT)
    reads = count(ci=800, full=10_000)
    command = [sys.executable, str(script), str(store if kind == "store" else slide), method, str(reads), "8"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
    found = json.loads(output)
    assert found["same"], "the pixels of the epochs differ"
    assert found["first"].keys() == found["last"].keys() == {"0", "1"}
    growth = [found["last"][worker] - found["first"][worker] for worker in ("0", "1")]
    assert max(growth) < 30  # MiB
    peaks = {
        "mib_after_one": [round(found["first"][worker]) for worker in "01"],
        "mib_after_all": [round(found["last"][worker]) for worker in "01"],
    }
    record_result(f"read_memory_{kind}_{method}", {"reads": found["reads"], "epochs": 8, "workers": 2, **peaks})
