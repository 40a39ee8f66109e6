"""A plan at one size of its images: what the memory that it takes there depends on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from lightning_plugin.boxes import Grid, reference_of
from lightning_plugin.execute.gradients import FEW
from lightning_plugin.graph import Node
from lightning_plugin.ops import Source
from lightning_plugin.plan import Plan, SegmentPlan
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.rehearsal.representative import effort, turns
from lightning_plugin.program.program import Program, programs, resolve

#: The tiles of a grid that a rehearsal runs: of those that run one after the other, the bytes of each map of each.
Tiles = tuple[tuple[int, ...], ...]


class Traits(NamedTuple):
    """What is so or not so of a segment. ``many``: of each of its grids, whether there are many tiles, over which
    gradients are added up in another type (`gradients.type_of_sum`); ``whole``: on which axes a tile is as long as the
    map; ``on_host``: whether its maps are there, and those that it reads."""

    many: tuple[bool, ...]
    whole: tuple[tuple[bool, ...], ...]
    on_host: tuple[bool, ...]


@dataclass(frozen=True)
class Size:
    """``image`` are the extents of the images, ``values`` the bytes of the network's values in the order of its nodes;
    of each segment there are its traits and the tiles of its grids, forward's and backward's."""

    image: tuple[int, ...]
    values: tuple[int, ...]
    traits: tuple[Traits, ...]
    tiles: tuple[tuple[Tiles, Tiles], ...]

    @staticmethod
    def of(plan: Plan, network: Network) -> Size:
        """The size of a network's images, for a plan with the grids and tiers that it has there."""
        nodes = network.nodes
        values = tuple(v.bytes for n in nodes for v in n.outputs)
        traits: list[Traits] = []
        tiles: list[tuple[Tiles, Tiles]] = []
        on_host: dict[int, bool] = {}
        for segment, targets, program in programs(plan, nodes):
            reads = program.reads if program is not None else [v for t in targets for v in t.node.maps]
            grids = () if program is None else (segment.forward, segment.backward)
            traits.append(
                Traits(
                    tuple(grid.tiles > FEW for grid in grids),
                    tuple(tuple(count == 1 for count in grid.counts) for grid in grids),
                    (segment.tier == "host", *(on_host.get(id(v), False) for v in reads)),
                )
            )
            tiles.append(rehearsed(segment, program, network))
            on_host.update((id(v), segment.tier == "host") for t in targets for v in t.node.outputs)
        return Size(image_of(nodes), values, tuple(traits), tuple(tiles))


def rehearsed(segment: SegmentPlan, program: Program | None, network: Network) -> tuple[Tiles, Tiles]:
    """The tiles of a segment's grids that a rehearsal runs; where there are no tiles, none."""
    if program is None:
        return (), ()
    ahead = segment.ahead or bool(program.announced)
    first, second = (
        network.repeats.once(program, ("turns", grid, ahead), partial(bytes_of, program, grid, effort(network), ahead))
        for grid in (segment.forward, segment.backward)
    )
    return first, second


def bytes_of(program: Program, grid: Grid, worst: int, ahead: bool) -> Tiles:
    """The bytes of each map of the tiles that may be met at a time, which are three that run one after the other."""
    return tuple(
        tuple(n for c in turn[i : i + 3] for n in c.bytes)
        for turn in turns(program, grid, worst, ahead)
        for i in range(max(1, len(turn) - 2))
    )


def image_of(nodes: Sequence[Node]) -> tuple[int, ...]:
    """The extents of the images."""
    return tuple(e for n in nodes if isinstance(n.op, Source) for e in n.outputs[0].space.extent)


def positions(nodes: Sequence[Node]) -> int:
    """Of the images, along all of their axes: a bag has more of them the more patches it has."""
    return max(1, sum(math.prod(n.outputs[0].space.extent) for n in nodes if isinstance(n.op, Source)))


def references(plan: Plan, nodes: Sequence[Node]) -> tuple[tuple[int, ...], ...]:
    """The map of each segment whose cuts the others follow."""
    return tuple(reference_of([t.map.space.extent for t in targets]) for targets in resolve(plan, nodes))


def tell_apart(nodes: Sequence[Node], sizes: Sequence[Size]) -> bool:
    """Whether sizes show what depends on an image's: it differs on every axis, every map differs with it, and no vector
    has the size of a side."""
    differ = (len(set(of_value)) > 1 for of_value in zip(*(s.values for s in sizes), strict=True))
    axes = zip(*(s.image for s in sizes), strict=True)
    return all(len(set(axis)) > 1 for axis in axes) and all(
        found == v.is_map or (v.is_map and math.prod(v.space.extent) == 1)
        for v, found in zip((v for n in nodes for v in n.outputs), differ, strict=True)
    )
