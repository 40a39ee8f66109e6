"""The ways, and what each cannot do."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.peers.environments import LIGHTSTREAM, Environment

#: The environment that the project runs in, where no other is named.
HERE = None


@dataclass(frozen=True)
class Way:
    """``function`` is of ``module`` in this folder; ``cannot`` says why not, for each kind of work it is no way for.

    ``share`` and ``of_rival`` are for ours: a budget of a share of plain PyTorch's memory, or one under which the
    process takes no more than the work's rival does.
    """

    label: str
    module: str
    function: str
    environment: Environment | None = HERE
    cannot: tuple[tuple[str, str], ...] = ()
    share: float | None = None
    of_rival: bool = False

    def reason(self, kind: str) -> str | None:
        return dict(self.cannot).get(kind)


NO_INSTANCES = "one image has no patches to go through by themselves"
ONE_IMAGE = "streams one image; a batch of two already has wrong gradients where there is a bias"
WAYS = {
    "plain": Way("plain PyTorch", "steps", "plain"),
    "checkpoint": Way("`checkpoint_sequential`, 5 segments", "steps", "checkpointed"),
    "save_on_cpu": Way("`save_on_cpu`", "steps", "on_cpu"),
    "compile": Way("`torch.compile`, `activation_memory_budget` 0.3", "compiling", "compiled"),
    "lightstream": Way("lightstream 1.0.7", "streaming", "streamed", LIGHTSTREAM, (("bag", ONE_IMAGE),)),
    "caching": Way(
        "gradient caching by hand", "steps", "cached", HERE, (("image", NO_INSTANCES), ("background", NO_INSTANCES))
    ),
    "ours": Way("ours, in the rival's memory", "ours", "tiled", of_rival=True),
    "ours_quarter": Way("ours, 1/4 of plain's activations", "ours", "tiled", share=0.25),
}
#: The way that others are compared with; its gradients are what theirs are to be.
PLAIN = "plain"
