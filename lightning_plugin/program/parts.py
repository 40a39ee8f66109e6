"""The connected parts of a segment.

[Note: parts] Two networks, or two heads on a frozen trunk, may share a segment, and with it the reading of tiles and
the trunk. To autograd they have nothing to do with each other: their losses are pulled back one after the other, in any
order, or one of them never. So each part of a segment whose targets are connected by values that require grad has an
`autograd.Function` of its own, that computes its own tiles again. Forward runs once for all. Targets that read the same
boundary are connected too: what made it is pulled back once.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_plugin.graph import Node
from lightning_plugin.ops import Source, Spread
from lightning_plugin.program.program import Program, Target


def connected(program: Program) -> list[list[Target]]:
    """The targets that require grad, grouped by what they are computed from; each group in the program's order."""
    steps = {n.serial for n in program.steps}
    group_of: dict[object, int] = {}
    groups: dict[int, list[Target]] = {}
    for i, target in enumerate(program.targets):
        if not target.requires_grad:
            continue
        reached = differentiated(target, steps)
        met = {group_of[s] for s in reached if s in group_of}
        joined = [t for g in sorted(met) for t in groups.pop(g)]
        groups[i] = [*joined, target]
        merged = {s for s, g in group_of.items() if g in met}
        group_of.update(dict.fromkeys(reached | merged, i))
    order = {t: i for i, t in enumerate(program.targets)}
    return sorted((sorted(g, key=lambda t: order[t]) for g in groups.values()), key=lambda g: order[g[0]])


def differentiated(target: Target, steps: set[int]) -> set[object]:
    """The steps that a target's gradient runs through, by serial, and the boundaries that it reaches."""
    found: set[object] = set()
    stack: list[Node] = [target.node]
    while stack:
        node = stack.pop()
        if node.serial in found:
            continue
        found.add(node.serial)
        for v in node.maps:
            if not v.requires_grad or v.node is None or isinstance(v.node.op, (Source, Spread)):
                continue
            if v.node.serial in steps:
                stack.append(v.node)
            else:
                found.add(("boundary", v))
    return found


def parts_of(program: Program) -> Sequence[Program]:
    """The programs of a segment's parts; a segment that is one part is its own."""
    if len(program.targets) == 1 and program.targets[0].requires_grad:
        return [program]
    groups = connected(program)
    if len(groups) == 1 and len(groups[0]) == len(program.targets):
        return [program]
    return [program.narrow(targets) for targets in groups]


def with_rest(program: Program, parts: Sequence[Program]) -> list[Program]:
    """The parts, and after them what of the program requires no grad."""
    done = {t for p in parts for t in p.targets}
    rest = [t for t in program.targets if t not in done]
    return [*parts, program.narrow(rest)] if rest else list(parts)
