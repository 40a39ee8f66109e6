"""The backward pass under way, and the nodes that it will run.

[Note: passes] A boundary's cotangent is collected by some segments and used by another, in one pass of autograd. A pass
may end early (a source fails, a hook raises) or be asked for some inputs only (``autograd.grad(loss, head)``). So what
one pass has collected is nothing to the next, and nothing is collected for a segment that the pass will not run.

[Note: failed] PyTorch keeps what a pass that failed had still to run, gradients and all, in a queue of the thread's,
and lets it go when a later pass comes upon it. It takes the youngest node first, so it never does so by itself: the
memory, and files, would be missing in each step to come. So a node that is older than all those is run before each
plan is chosen, to have them looked at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.errors import RecordingError
from lightning_plugin.private import batched
from lightning_plugin.private import current_pass as current_pass
from lightning_plugin.private import retains_graph as retains_graph
from lightning_plugin.private import will_run as will_run


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of a function whose own gradients have no graph: it refuses to run where one is asked for
    (``create_graph=True``), as PyTorch's `once_differentiable` does only where the gradient it is given requires grad.
    """

    @wraps(backward)
    def run(*args: Any) -> Any:
        if torch.is_grad_enabled():
            raise RecordingError(
                "backward with create_graph=True was asked of a tiled computation: gradients of gradients would need "
                "every tile at once. Compute the penalty on a crop with plain PyTorch instead."
            )
        one_at_a_time(args)
        return backward(*args)

    return run


def one_at_a_time(gradients: Iterable[Any]) -> None:
    """Refuse gradients that stand for several."""
    if any(isinstance(g, Tensor) and batched(g) for g in gradients):
        raise RecordingError(
            "several gradients at once (is_grads_batched, vmap) were asked of a tiled computation, whose tiles are "
            "computed for one. Call backward for each in turn, with retain_graph=True."
        )


class _Old(threading.local):
    """Of each thread a node of autograd's that is older than those of its steps; autograd counts them by thread."""

    def __init__(self) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            self.leaf = torch.zeros((), device="cpu", requires_grad=True)
            self.node = self.leaf * 1


_old = _Old()


def forget_failed() -> None:
    """Let go of what passes that failed have left in this thread; see [Note: failed]."""
    with torch.inference_mode(False):
        torch.autograd.grad(_old.node, _old.leaf, retain_graph=True)
