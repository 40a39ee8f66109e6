"""Training a language model that does not fit, beside another library that offloads: DeepSpeed's ZeRO-3, on a CPU.

    python -m benchmarks.offloading [--cases plain zero3 zero3-nvme sft-host sft-disk] [--width 768 --depth 16]

Each case is a process of its own on one thread: four steps of AdamW in float32, of which the first does not count, on
the same batches. The engine's budget is an eighth of parameters, gradients and AdamW's state. Given are seconds a step
(median of three), the most memory that the process held (all of it, and what is neither a file's nor shared), and how
far losses are from plain PyTorch's.

DeepSpeed is no dependency. It is installed beside the project's PyTorch by ``DS_BUILD_OPS=0 pip install --no-deps
--no-build-isolation deepspeed`` with hjson, ninja, py-cpuinfo, einops, msgpack, psutil and pydantic; ``zero3-nvme``
needs libaio's headers. It compiles at its first use (minutes). Where it is not installed its cases are left out.

Writes benchmarks/results/offloading.json, a case for each.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.keep import keep_case
from benchmarks.streamed import Language, bytes_of

CASES = ("plain", "zero3", "zero3-small", "zero3-nvme", "sft-host", "sft-disk")
TOKENS, STEPS, MIB = 192, 4, 2**20
#: Where DeepSpeed keeps less at a time: its own measures of how much is fetched, reduced and stepped at once.
SMALL = {
    "stage3_max_live_parameters": 10**7,
    "stage3_max_reuse_distance": 10**7,
    "stage3_prefetch_bucket_size": 8 * 10**6,
    "reduce_bucket_size": 8 * 10**6,
    "sub_group_size": 8 * 10**6,
    "stage3_param_persistence_threshold": 0,
}

#: A step on a batch: its loss.
Step = Callable[[Tensor], Tensor]


class Watch(threading.Thread):
    """The most anonymous memory of this process, looked at every ten milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.on = 0, True

    def run(self) -> None:
        while self.on:
            lines = Path("/proc/self/status").read_text().splitlines()
            now = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
            self.most = max(self.most, now)
            time.sleep(0.01)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 512, (1, 1, TOKENS), generator=generator) for _ in range(STEPS)]


def loss_of(net: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(net(ids), ids[:, 0].roll(-1, 1))


def plain(net: Language) -> Step:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def step(ids: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, ids)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def zero3(make: Callable[[], Language], how: str, folder: str) -> Step:
    """DeepSpeed's stage 3, parameters and optimizer offloaded."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29555", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", DS_ACCELERATOR="cpu"
    )
    import deepspeed  # type: ignore[import-not-found]
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for several processes on one machine
    away: dict[str, Any] = {"device": "cpu", "pin_memory": False}
    zero: dict[str, Any] = {"stage": 3, "offload_param": dict(away), "offload_optimizer": dict(away)}
    zero |= SMALL if how else {}
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "steps_per_print": 10**9}
    config["gradient_clipping"] = 0.0  # else 0.19 clips by a norm of 1
    if how == "nvme":
        away = {"device": "nvme", "nvme_path": folder, "pin_memory": False}
        zero["offload_param"] = {**away, "buffer_count": 24, "buffer_size": 3 * 10**6, "max_in_cpu": 0}
        zero["offload_optimizer"] = {**away, "buffer_count": 4}
        zero["stage3_prefetch_bucket_size"] = 0  # else 0.19 fails: "param 195 already assigned swap buffer id 18"
        config["aio"] = {"block_size": 2**20, "queue_depth": 8, "thread_count": 1, "overlap_events": True}
    deepspeed.init_distributed("gloo")
    if how == "nvme":  # built elsewhere, its swapper takes bfloat16 for whatever the model has
        with deepspeed.zero.Init(config_dict_or_path=config):
            net = make()
    else:
        net = make()
    optimizer = DeepSpeedCPUAdam(net.parameters(), lr=1e-3, weight_decay=1e-2, adamw_mode=True)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    torch.set_num_threads(1)

    def step(ids: Tensor) -> Tensor:
        loss = loss_of(engine, ids)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def run(step: Step) -> tuple[list[float], list[float]]:
    losses, seconds = [], []
    for ids in batches():
        began = time.perf_counter()
        losses.append(float(step(ids)))
        seconds.append(time.perf_counter() - began)
    return losses, seconds


def sft(net: Language, parameters: str, budget: int) -> tuple[list[float], list[float]]:
    """A Trainer with the engine's strategy."""
    import pytorch_lightning as pl

    from lightning_plugin import SFTStrategy

    losses: list[float] = []
    seconds: list[float] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, ids: Tensor, place: int) -> Tensor:
            return F.cross_entropy(self.net(ids), batches()[place][:, 0].roll(-1, 1))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def on_train_batch_start(self, *args: Any) -> None:
            self.began = time.perf_counter()

        def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
            losses.append(float(outputs["loss"]))
            seconds.append(time.perf_counter() - self.began)

    strategy = SFTStrategy(budget=budget, parameters=parameters, tile_over=1)  # type: ignore[arg-type]
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", max_epochs=1, **quiet)  # type: ignore[arg-type]
    trainer.fit(Module(), torch.utils.data.DataLoader(batches(), batch_size=None))  # type: ignore[arg-type]
    return losses, seconds


def alone(case: str, width: int, depth: int) -> dict[str, Any]:
    """One case in this process."""
    torch.set_num_threads(1)
    watch = Watch()
    watch.start()

    def make() -> Language:
        torch.manual_seed(0)
        return Language(width, depth, TOKENS)

    kind, _, how = case.partition("-")
    with torch.device("meta"):
        parameters = bytes_of(Language(width, depth, TOKENS))
    budget = 4 * parameters // 8
    with tempfile.TemporaryDirectory() as folder:
        if kind == "sft":
            losses, seconds = sft(make(), how, budget)
        else:
            losses, seconds = run(plain(make()) if kind == "plain" else zero3(make, how, folder))
    watch.on = False
    watch.join()
    return {
        "parameters": parameters,
        "budget": budget if kind == "sft" else None,
        "losses": losses,
        "seconds a step": statistics.median(seconds[1:]),
        "all seconds": seconds,
        "process peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "anonymous peak": watch.most,
    }


def compare(cases: Sequence[str], width: int, depth: int) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        print("DeepSpeed is not installed: its cases are left out", file=sys.stderr)
        cases = [case for case in cases if not case.startswith("zero3")]
    losses: list[float] = []
    for case in cases:
        words = [sys.executable, "-m", "benchmarks.offloading", "--alone", case, "--width", str(width)]
        done = subprocess.run([*words, "--depth", str(depth)], capture_output=True, text=True, check=False)
        found = [line for line in done.stdout.splitlines() if line.startswith('{"parameters"')]
        if not found:
            raise SystemExit(f"{case}: {done.stderr[-3000:]}")
        row = json.loads(found[-1])
        losses = row["losses"] if case == "plain" else losses
        if losses:
            pairs = zip(row["losses"], losses, strict=True)
            row["losses differ by"] = max(abs(a - b) / abs(b) for a, b in pairs)
        keep_case("offloading", case, row)
        print(case, {name: value for name, value in row.items() if name not in ("losses", "all seconds")}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--alone", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--depth", type=int, default=16)
    options = parser.parse_args()
    if options.alone is None:
        compare(options.cases, options.width, options.depth)
        return
    print(json.dumps(alone(options.alone, options.width, options.depth)), flush=True)
    os._exit(0)  # DeepSpeed's threads do not end


if __name__ == "__main__":
    main()
