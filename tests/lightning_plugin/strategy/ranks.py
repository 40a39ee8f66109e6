"""What a rank of several does: started by `launch`, one process for each rank, as torchrun starts a script.

Every scenario is a function of a folder; rank 0 leaves what it found there.
"""

from __future__ import annotations

import copy
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.warm import start

#: In bytes: half of what a step on one image would hold without tiles.
BUDGET = 200_000


@dataclass(frozen=True)
class Ended:
    """How a rank ended, and what it wrote."""

    returncode: int | None
    stdout: str


def launch(scenario: str, folder: Path, world: int = 2, timeout: float = 240) -> list[Ended]:
    """Run a scenario on several ranks; returns each rank's end. A hang is a failure."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test",
    }  # fmt: skip
    logs = [folder / f"rank-{rank}.log" for rank in range(world)]
    started = [
        start(log, play, scenario, folder, environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, log in enumerate(logs)
    ]
    end = time.monotonic() + timeout
    try:
        for p in started:
            p.join(max(1, end - time.monotonic()))
        assert all(p.exitcode is not None for p in started), [log.read_text() for log in logs]
    finally:
        for p in started:
            p.kill()
    return [Ended(p.exitcode, log.read_text()) for p, log in zip(started, logs, strict=True)]


def succeed(scenario: str, folder: Path, world: int = 2) -> Any:
    """What rank 0 found in a scenario in which all ranks end well."""
    for rank, done in enumerate(launch(scenario, folder, world)):
        assert done.returncode == 0, f"rank {rank}: {done.stdout}"
    return torch.load(folder / "found.pt", weights_only=False)


def leave(folder: Path, found: Any) -> None:
    if dist.get_rank() == 0:
        torch.save(found, folder / "found.pt")
    dist.barrier()


# Scenarios


def fitted(folder: Path, make: Any, strategy: Any = None, data: Any = None, **options: Any) -> Any:
    from lightning_plugin import SFTDDPStrategy
    from tests.lightning_plugin.strategy.modules import loader
    from tests.lightning_plugin.strategy.training import TILES, trainer

    torch.manual_seed(0)
    module = make()
    defaults = {"devices": 2, "max_steps": 3}
    torch.manual_seed(dist_rank())  # ranks that agree only by accident would be found out
    run = trainer(strategy or SFTDDPStrategy(**TILES), **(defaults | options))
    run.fit(module, data or loader(6, 1, sampler=range(dist_rank(), 6, 2)))
    assert run.strategy.plan is not None, "nothing was tiled"
    return module, run


def dist_rank() -> int:
    return int(os.environ["RANK"])


def dist_world() -> int:
    return int(os.environ["WORLD_SIZE"])


def gathered(losses: list[Tensor]) -> Tensor:
    """The mean over ranks of each step's loss."""
    mine = torch.stack([loss.detach() for loss in losses])
    dist.all_reduce(mine)
    return mine / dist.get_world_size()


def synchronized(folder: Path) -> None:
    from tests.lightning_plugin.strategy.modules import Slides

    module, _ = fitted(folder, Slides, sync_batchnorm=True)
    leave(folder, {"state": module.state_dict(), "losses": gathered(module.losses), "kinds": kinds(module)})


def kinds(module: nn.Module) -> set[str]:
    return {type(m).__name__ for m in module.modules()}


def pytorchs_own(folder: Path) -> None:
    """The user has converted the layers, and leaves parameters unused."""
    from lightning_plugin import SFTDDPStrategy
    from tests.lightning_plugin.strategy.modules import Slides
    from tests.lightning_plugin.strategy.training import TILES

    class Converted(Slides):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.SyncBatchNorm.convert_sync_batchnorm(self.net)
            self.unused = nn.Linear(3, 3)

    module, _ = fitted(folder, Converted, SFTDDPStrategy(**TILES, find_unused_parameters=True))
    leave(folder, {"state": module.state_dict(), "losses": gathered(module.losses)})


def frozen(folder: Path) -> None:
    from tests.lightning_plugin.strategy.modules import Frozen

    module, _ = fitted(folder, Frozen, accumulate_grad_batches=2)
    leave(folder, {"state": module.state_dict(), "losses": gathered(module.losses)})


def by_hand(folder: Path) -> None:
    from tests.lightning_plugin.strategy.modules import FrozenByHand

    module, _ = fitted(folder, FrozenByHand, max_steps=-1, max_epochs=1)
    leave(folder, {"state": module.state_dict(), "losses": gathered(module.losses)})


def uneven(folder: Path) -> None:
    """Images of different sizes, cut into different numbers of tiles, meet in the statistics."""
    from lightning_plugin import TiledModule
    from lightning_plugin.strategy.synced import convert_sync_batchnorm
    from tests.lightning_plugin.strategy.joint import images, network

    dist.init_process_group("gloo")
    net = convert_sync_batchnorm(network(), convert_all=True)
    tiled = TiledModule(net, tiles=(2, 3) if dist.get_rank() else (5, 4))
    result = tiled(images()[dist.get_rank()])
    result.square().sum().backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
    outputs: list[Any] = [None, None]
    dist.all_gather_object(outputs, result.detach())
    leave(folder, {"outputs": outputs, "grads": [p.grad for p in net.parameters()], "buffers": list(net.buffers())})


def resumed(folder: Path) -> None:
    """A run of three epochs, and one that goes on after its first."""
    from pytorch_lightning.callbacks import ModelCheckpoint

    from lightning_plugin import SFTDDPStrategy
    from tests.lightning_plugin.strategy.modules import Slides, loader
    from tests.lightning_plugin.strategy.training import TILES, trainer

    weights = []
    for resume in (None, folder / "step=2.ckpt"):
        torch.manual_seed(10 * dist_rank() + (resume is not None))
        module = Slides(dropout=0.4)
        keep = ModelCheckpoint(folder if resume is None else folder / "again", "{step}", save_top_k=-1)
        run = trainer(
            SFTDDPStrategy(**TILES), devices=2, max_epochs=2, callbacks=[keep], enable_checkpointing=True,
            precision="32-true",
        )  # fmt: skip
        data = loader(4, 1, dtype=torch.float32, sampler=OwnOrder(4))
        run.fit(module, data, ckpt_path=resume)
        weights.append({k: v.clone() for k, v in module.state_dict().items()})
    leave(folder, weights)


class OwnOrder(torch.utils.data.Sampler):
    """Each rank draws the order of its own images."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count // 2

    def __iter__(self) -> Any:
        return iter((2 * torch.randperm(len(self)) + dist_rank()).tolist())


def streamed(folder: Path) -> None:
    """Each rank has bags of other sizes, so that its plans stream other parameters; gradients are accumulated."""
    stream(folder, "batch", accumulate_grad_batches=2)


def streamed_shared(folder: Path) -> None:
    stream(folder, "image")


def stream(folder: Path, split: Any, **options: Any) -> None:
    from lightning_plugin import SFTDDPStrategy
    from tests.lightning_plugin.strategy.streamed import StreamedModule, bags, tight_budget

    class Own(StreamedModule):
        def setup(self, stage: str) -> None:
            if dist.get_rank():
                for t in (*self.parameters(), *self.buffers()):
                    t.data.zero_()

    world = dist_world()
    budget = tight_budget(StreamedModule())
    strategy = SFTDDPStrategy(split=split, budget=budget, parameters="disk", tile_over=1)
    rows = range(8) if split == "image" else range(dist_rank(), 8, world)
    module, run = fitted(folder, Own, strategy, bags(rows), devices=world, max_steps=-1, max_epochs=1, **options)
    homes = strategy.engine.homes
    mine = {
        "streamed": sorted(n for n, p in module.named_parameters() if p in homes),
        "states": all(homes.file(s["exp_avg"]) is not None for p, s in run.optimizers[0].state.items() if p in homes),
        "peak": strategy.report.measured_peak_bytes,
        "budget": budget,
    }
    ranks: list[Any] = [None] * world
    dist.all_gather_object(ranks, mine)
    states: list[Any] = [None] * world
    dist.all_gather_object(states, {name: value.clone() for name, value in module.state_dict().items()})
    leave(folder, {"states": states, "ranks": ranks})


# Scenarios in which ranks share the tiles of each image


def shared(folder: Path) -> None:
    """Ranks whose own random numbers and weights differ, and a shuffled loader; Lightning may replace its sampler."""
    from lightning_plugin import SFTDDPStrategy
    from tests.lightning_plugin.strategy.modules import Noisy, loader
    from tests.lightning_plugin.strategy.training import TILES

    class Own(Noisy):
        def setup(self, stage: str) -> None:
            if dist.get_rank():
                torch.nn.init.zeros_(self.net.head.weight)

    strategy = SFTDDPStrategy(**TILES, split="image")
    options: dict[str, Any] = {"use_distributed_sampler": True, "max_epochs": 2, "max_steps": -1}
    module, run = fitted(folder, Own, strategy, loader(3, 1, shuffle=True), **options)
    tiles: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(tiles, (strategy.report.tiles, strategy.report.planned_tiles))
    losses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(losses, torch.stack(module.losses))
    found = {"state": module.state_dict(), "losses": losses, "tiles": tiles, "steps": run.global_step}
    run.validate(module, loader(2, 1), verbose=False)
    leave(folder, found | {"validated": run.logged_metrics["val_loss"]})


def shared_budget(folder: Path) -> None:
    """By hand, with two optimizers, under a budget; layers that the user made synchronise themselves."""
    from lightning_plugin import SFTDDPStrategy
    from tests.lightning_plugin.strategy.modules import Slides, loader

    class Converted(Slides):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.SyncBatchNorm.convert_sync_batchnorm(self.net)

    strategy = SFTDDPStrategy(budget=BUDGET, tile_over=1, split="image")
    options: dict[str, Any] = {"use_distributed_sampler": True, "accumulate_grad_batches": 2}
    module, _ = fitted(folder, Converted, strategy, loader(6, 1), **options)
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, (strategy.report.measured_peak_bytes, strategy.report.tiles))
    leave(folder, {"state": module.state_dict(), "losses": gathered(module.losses), "peaks": peaks})


def shared_networks(folder: Path) -> None:
    """Random networks under random plans, cut into more and into fewer tiles than there are ranks."""
    from hypothesis import HealthCheck, Phase, given, seed, settings

    from lightning_plugin.team import Team
    from tests.lightning_plugin.compared import Step, differences, wrong
    from tests.lightning_plugin.networks import Case, cases

    dist.init_process_group("gloo")
    found: dict[str, Any] = {"networks": 0, "wrong": []}

    @settings(max_examples=9, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=HealthCheck)
    @seed(1)
    @given(cases())
    def every(case: Case) -> None:
        case.plan.rows, case.plan.team = 0, Team.of(torch.device("cpu"))
        plain, tiled = Step(case, None), Step(case, case.plan)
        found["networks"] += bool(plain.loss.isfinite())
        errors = wrong(case, differences(tiled, plain)) if plain.loss.isfinite() else {}
        found["wrong"] += [errors] if errors else []

    every()
    found["background"] = [on_background(Team.of(torch.device("cpu")), padded) for padded in (False, True)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    leave(folder, everyone)


def on_background(team: Any, padded: bool) -> dict[str, Any]:
    """Identical tiles of a slide that is mostly background, or of a batch that is mostly padding, of which maps go to
    the disk: what was saved on this rank, and the largest error."""
    from lightning_plugin import LazyImage, TiledModule
    from tests.exactness import difference
    from tests.lightning_plugin.test_identical_tiles import Count, plainly, slide
    from tests.lightning_plugin.test_store import lower

    torch.manual_seed(0)
    net = plainly().double()
    tiled, background, count = TiledModule(copy.deepcopy(net), tiles=(9, 7)), slide(batch=1 + padded), Count()
    if padded:
        tiled.engine = lower("disk", False, (9, 7), (9, 7))
    tiled.engine.planner.team = team
    tiled.engine.progress.listeners.append(count)
    tiled(LazyImage.from_tensor(background.tensor) if padded else LazyImage(background)).sum().backward()
    net(background.tensor).sum().backward()
    floor = 1e-3 * max(p.grad.abs().max().item() for p in net.parameters())
    pairs = zip((*tiled.parameters(), *tiled.buffers()), (*net.parameters(), *net.buffers()), strict=True)
    errors = [difference(*((a, b) if a.grad is None else (a.grad, b.grad)), floor) for a, b in pairs]
    return {"saved": count.saved, "tiles": count.tiles, "error": max(errors)}


def sharded(folder: Path) -> None:
    """FSDP around a tiled module, and within it: the largest difference of a gradient, or the refusal."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from lightning_plugin import TiledModule
    from tests.exactness import difference

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Tanh())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), block, head).double()
    images = torch.randn(2, 3, 24, 20, dtype=torch.float64)
    (plain(images).square().sum() / 2).backward()

    def shard(module: nn.Module) -> nn.Module:
        return fully_shard(module, mesh=mesh)

    def wrap(net: nn.Sequential, layer: int | None = None, whole: bool = False) -> nn.Module:
        if layer is not None:
            shard(net[layer])
        return TiledModule(shard(net) if whole else net, tiles=2)

    ways: dict[str, Any] = {
        "around": lambda net: shard(wrap(net)),
        "map around": lambda net: shard(wrap(net[:2])),
        "within": lambda net: wrap(net, whole=True),
        "map within": lambda net: wrap(net[:2], whole=True),
        "block": lambda net: wrap(net, 1),
        "block, and the whole": lambda net: wrap(net, 1, whole=True),
        "head, and the whole": lambda net: wrap(net, 2, whole=True),
        "block, and around": lambda net: shard(wrap(net, 1)),
    }
    found: dict[str, Any] = {}
    for name, way in ways.items():
        module = way(copy.deepcopy(plain))
        try:
            result = module(images[dist_rank()][None])
        except RuntimeError as error:
            found[name] = str(error)
            continue
        if result.dim() == 4:
            result = copy.deepcopy(plain[2])(result)
        result.square().sum().backward()
        pairs = zip(module.parameters(), plain.parameters(), strict=False)
        found[name] = max(difference(p.grad.full_tensor(), q.grad) for p, q in pairs)
    leave(folder, found)


def strangers(folder: Path) -> None:
    """Each rank brings an image of its own."""
    from lightning_plugin import SFTDDPStrategy
    from tests.lightning_plugin.strategy.modules import Slides
    from tests.lightning_plugin.strategy.training import TILES

    fitted(folder, Slides, SFTDDPStrategy(**TILES, split="image"))


def unequal(folder: Path) -> None:
    from tests.lightning_plugin.strategy.modules import Slides, loader

    fitted(folder, Slides, data=loader(6, 1, sampler=range(4 if dist_rank() else 2)))


def dying(folder: Path) -> None:
    from tests.lightning_plugin.strategy.modules import Slides

    class Dying(Slides):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1 and dist.get_rank() == 1:
                os._exit(7)

    fitted(folder, Dying, sync_batchnorm=True)


def play(scenario: str, folder: Path) -> None:
    """What a process does that is a rank."""
    torch.set_num_threads(1)  # ranks would only fight for the cores
    globals()[scenario](folder)
    if dist.is_initialized():
        dist.destroy_process_group()
