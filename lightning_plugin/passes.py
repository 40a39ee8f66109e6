"""Which backward pass is under way, and what it will run.

[Note: passes] A boundary's cotangent is collected by some segments and used by another, in one pass of autograd. A pass
may end early (a source fails, a hook raises) or be asked for some inputs only (``autograd.grad(loss, head)``). So what
one pass has collected is nothing to the next, and nothing is collected for a segment that the pass will not run.
"""

from __future__ import annotations

from typing import Any

import torch


def current_pass() -> int:
    """The number of the backward pass under way in this thread, which no other pass has."""
    return int(torch._C._current_graph_task_id())


def retains_graph() -> bool:
    """Whether the pass under way leaves the graph as it is, for another pass."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def will_run(node: Any) -> bool:
    """Whether the pass under way runs a node of autograd's graph."""
    return node is not None and bool(torch._C._will_engine_execute_node(node))
