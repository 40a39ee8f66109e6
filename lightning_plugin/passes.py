"""Which backward pass is under way, and what it will run.

[Note: passes] A boundary's cotangent is collected by some segments and used by another, in one pass of autograd. A pass
may end early (a source fails, a hook raises) or be asked for some inputs only (``autograd.grad(loss, head)``). So what
one pass has collected is nothing to the next, and nothing is collected for a segment that the pass will not run.
"""

from __future__ import annotations

from typing import Any

from lightning_plugin.private import graph_task, graph_task_keeps_graph, graph_task_runs


def current_pass() -> int:
    """The number of the backward pass under way in this thread, which no other pass has."""
    return graph_task()


def retains_graph() -> bool:
    """Whether the pass under way leaves the graph as it is, for another pass."""
    return graph_task_keeps_graph()


def will_run(node: Any) -> bool:
    """Whether the pass under way runs a node of autograd's graph."""
    return node is not None and graph_task_runs(node)
