"""A plan for one size, made one for another.

[Note: recipe] What a plan decides (where the network is cut, what is kept, where maps lie, how large tiles are) does
not depend on an image's exact size. A *recipe* is a plan with the size it was made for: at another size its tiles have
the sides they had, and there are as many as it takes. What the plan holds there is known by *formula*. Whatever a
rehearsal notes is either bounded at all sizes, as what tiles need, whose sides are the same; or it is in proportion to
some value of the network: a map that is stored or kept, a cotangent. Which of the two is seen from the rehearsals of
two sizes. So the first size is searched for and rehearsed, the second rehearsed, and others are looked up.

A formula holds where the largest tiles have the same sides, and the worst (`representative`) are no larger than some
that were rehearsed, and hardly smaller than the largest: a last tile may be larger, and where each touches a border all
are smaller. A size for which that is not so is rehearsed, and teaches the formula. Where two rehearsals do not agree in
what they note and in which order, or where a vector has the size of an image's side, there is no formula, and each size
is rehearsed.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial

from lightning_plugin.bounded import put_last
from lightning_plugin.boxes import Grid, reference_of
from lightning_plugin.execute.gradients import FEW
from lightning_plugin.graph import Node
from lightning_plugin.ops import Source
from lightning_plugin.plan import Plan, SegmentForecast, SegmentPlan
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.costs.lower import Lower
from lightning_plugin.planner.costs.rates import Rates
from lightning_plugin.planner.recipes.retier import retiered
from lightning_plugin.planner.rehearsal.account import Account, Reading, account
from lightning_plugin.planner.rehearsal.rehearse import noted
from lightning_plugin.planner.rehearsal.representative import candidates, effort, heaviest, within
from lightning_plugin.planner.search.predict import predict
from lightning_plugin.program.program import Program, resolve
from lightning_plugin.stretch import Note

#: An image may have so many times the positions of the one that a recipe was made for, or so many times fewer: beyond,
#: other decisions are worth a search.
NEAR = 1.2
#: Tiles whose sides are so much shorter than those that a formula is of are rehearsed.
CLOSE = 0.995
#: After so many sizes that a formula did not cover, no more are remembered.
MOST_EXAMPLES = 8
#: Of so many kinds of tiles the latest are remembered: images no larger than some tiles have kinds of their own.
MOST_KINDS = 32


#: The sizes of the tiles of each grid of a plan that a rehearsal runs.
Worst = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True)
class Example:
    """What a rehearsal noted at one size: ``bytes`` are those of the network's values, in the order of its nodes,
    ``image`` the extents of its images."""

    image: tuple[int, ...]
    bytes: tuple[int, ...]
    notes: tuple[Note, ...]
    worst: Worst


#: A size: always the same, or in proportion to values, by their places and factors.
Term = int | tuple[tuple[int, Fraction], ...]


@dataclass(frozen=True)
class Formula:
    """The notes of a rehearsal at any size whose worst tiles are no larger than some that were ``seen``, and not much
    smaller than the largest of those: where all tiles touch a border, say, they need less."""

    notes: tuple[Note, ...]
    terms: tuple[Term, ...]
    seen: Worst

    def covers(self, worst: Worst) -> bool:
        return all(
            all(any(within(tile, other) for other in seen) for tile in here)
            and max(map(sum, here), default=0) >= CLOSE * max(map(sum, seen), default=0)
            for seen, here in zip(self.seen, worst, strict=True)
        )

    @staticmethod
    def of(examples: Sequence[Example]) -> Formula | None:
        """The formula that examples agree in, if they do."""
        first, *others = examples
        if any([(n.what, n.who) for n in first.notes] != [(n.what, n.who) for n in e.notes] for e in others):
            return None
        values = list(zip(*(e.bytes for e in examples), strict=True))
        known: dict[tuple[int, ...], Term | None] = {}
        terms: list[Term] = []
        for notes in zip(*(e.notes for e in examples), strict=True):
            sizes = tuple(n.size for n in notes)
            if sizes not in known:
                known[sizes] = proportion(sizes, values)
            term = known[sizes]
            if notes[0].what == "passing" and not isinstance(term, int):
                term = max(sizes)  # what tiles need
            if term is None:
                return None
            terms.append(term)
        seen = tuple(tuple(itertools.chain(*grids)) for grids in zip(*(e.worst for e in examples), strict=True))
        return Formula(first.notes, tuple(terms), seen)

    def account(self, sizes: Sequence[int]) -> Account:
        """What is held where the network's values have these sizes."""
        found = {term: size_of(term, sizes) for term in set(self.terms)}
        return Reading().read(self.notes, (found[term] for term in self.terms))


def proportion(sizes: tuple[int, ...], values: Sequence[tuple[int, ...]]) -> Term | None:
    """What notes of such sizes, one of each example, are in proportion to."""
    first = sizes[0]
    if all(size == first for size in sizes):
        return first
    found = [
        (i, Fraction(first, v[0]))
        for i, v in enumerate(values)
        if v[0]
        and any(b != v[0] for b in v)
        and all(first * b == size * v[0] for b, size in zip(v, sizes, strict=True))
    ]
    return tuple(found) or None


def size_of(term: Term, sizes: Sequence[int]) -> int:
    """Of several values that were in the same proportion in all examples, the one that says most."""
    return term if isinstance(term, int) else max(math.ceil(sizes[i] * factor) for i, factor in term)


#: Of each grid of a plan, the sides of its largest tile, shorter than they should be where a map is; and whether it has
#: many tiles, over which gradients are added up in another type (`gradients.type_of_sum`); and whether maps are on the
#: host. A segment that is kept has no tiles, whatever the size.
Kinds = tuple[tuple[tuple[int, ...], bool, bool], ...]


@dataclass(eq=False)
class Recipe:
    """A plan, and what was seen of it at the sizes it was used for: ``image`` are the extents of the images it was made
    for, ``references`` the smallest maps of its segments there."""

    plan: Plan
    image: tuple[int, ...]
    references: tuple[tuple[int, ...], ...]
    positions: int
    examples: dict[Kinds, list[Example]] = field(default_factory=dict)
    formulas: dict[Kinds, Formula | None] = field(default_factory=dict)
    #: How many sizes were rehearsed.
    taught: int = 0
    #: The fewest positions of an image with which the plan did not keep the budget.
    too_large: float = math.inf

    @staticmethod
    def of(plan: Plan, network: Network, notes: Sequence[Note]) -> Recipe:
        """The recipe of a plan that was rehearsed."""
        nodes = network.nodes
        recipe = Recipe(plan, image_of(nodes), references(plan, nodes), positions(nodes))
        recipe.learn(plan, network, notes, worst_of(plan, network))
        return recipe

    def distance(self, nodes: Sequence[Node]) -> float:
        """How many times larger or smaller an image is."""
        ratio = positions(nodes) / self.positions
        return max(ratio, 1 / ratio)

    def at(self, network: Network, rates: Rates, lower: Lower) -> Plan | None:
        """The plan for a network of the same structure and another size, if there is room for its maps."""
        nodes = network.nodes
        if image_of(nodes) == self.image:
            return self.plan
        plan = self.resized(nodes)
        found = retiered(plan, network, lower)
        if found is None:
            return None
        foretold = self.known(found, network)
        if found == plan:
            return foretold
        slower = predict(found, network, rates) / predict(plan, network, rates)
        seconds = foretold.seconds * slower
        return dataclasses.replace(foretold, forecast=dataclasses.replace(foretold.forecast, seconds=seconds))

    def known(self, plan: Plan, network: Network) -> Plan:
        """A plan for another size with its forecast, by formula or by a rehearsal."""
        nodes = network.nodes
        image = image_of(nodes)
        kinds, worst = kinds_of(plan, nodes), worst_of(plan, network)
        examples = self.examples.get(kinds, [])
        for example in examples:
            if example.image == image and example.worst == worst:
                return self.foretold(plan, account(example.notes), nodes)
        if kinds not in self.formulas and examples and tell_apart(nodes, examples):  # another process has left them
            self.formulas[kinds] = Formula.of(examples)
        formula = self.formulas.get(kinds)
        if formula is not None and formula.covers(worst):
            put_last(self.examples, kinds, examples, MOST_KINDS)
            return self.foretold(plan, formula.account(value_bytes(nodes)), nodes)
        notes = noted(plan, network)
        self.learn(plan, network, notes, worst)
        return self.foretold(plan, account(notes), nodes)

    def learn(self, plan: Plan, network: Network, notes: Sequence[Note], worst: Worst) -> None:
        """Take a rehearsal as an example."""
        sizes, kinds = value_bytes(network.nodes), kinds_of(plan, network.nodes)
        examples = put_last(self.examples, kinds, self.examples.get(kinds, []), MOST_KINDS)
        self.formulas = {k: formula for k, formula in self.formulas.items() if k in self.examples}
        if len(examples) < MOST_EXAMPLES and all(sizes != e.bytes for e in examples):
            examples.append(Example(image_of(network.nodes), sizes, tuple(notes), worst))
            self.taught += 1
            if tell_apart(network.nodes, examples):
                self.formulas[kinds] = Formula.of(examples)

    def resized(self, nodes: Sequence[Node]) -> Plan:
        """The same decisions, with tiles of the same sides."""
        now = references(self.plan, nodes)
        segments = tuple(
            s
            if s.keep
            else dataclasses.replace(
                s, forward=grid_at(s, s.forward, was, size), backward=grid_at(s, s.backward, was, size)
            )
            for s, was, size in zip(self.plan.segments, self.references, now, strict=True)
        )
        return dataclasses.replace(self.plan, segments=segments)

    def foretold(self, plan: Plan, found: Account, nodes: Sequence[Node]) -> Plan:
        """A plan with the forecast of what it holds, and of seconds in proportion to the image."""
        ratio = positions(nodes) / self.positions
        segments = tuple(
            dataclasses.replace(s, forecast=resized_forecast(with_account(s.forecast, i, found), ratio))
            for i, s in enumerate(plan.segments)
        )
        forecast = dataclasses.replace(
            plan.forecast,
            peak_bytes=found.peak + plan.forecast.reserve_bytes,
            held_bytes=found.held,
            plain_bytes=int(plan.plain_bytes * ratio),
            index_bytes=int(plan.forecast.index_bytes * ratio),
            seconds=plan.seconds * ratio,
        )
        return dataclasses.replace(plan, segments=segments, forecast=forecast)


def resized_forecast(forecast: SegmentForecast, ratio: float) -> SegmentForecast:
    """What no account says, in proportion to the image."""
    seconds, stored = forecast.seconds * ratio, int(forecast.stored_bytes * ratio)
    return dataclasses.replace(forecast, seconds=seconds, stored_bytes=stored)


def with_account(forecast: SegmentForecast, place: int, found: Account) -> SegmentForecast:
    """A segment's forecast with what an account says."""
    return dataclasses.replace(
        forecast,
        forward_bytes=found.forward.get(place, 0),
        backward_bytes=found.backward.get(place, 0),
        backward_needs=found.needs.get(place, 0),
        retained_needs=found.retained.get(place, 0),
    )


def image_of(nodes: Sequence[Node]) -> tuple[int, ...]:
    """The extents of the images."""
    return tuple(e for n in nodes if isinstance(n.op, Source) for e in n.outputs[0].space.extent)


def value_bytes(nodes: Sequence[Node]) -> tuple[int, ...]:
    return tuple(v.bytes for n in nodes for v in n.outputs)


def positions(nodes: Sequence[Node]) -> int:
    """Of the images, along all of their axes: a bag has more of them the more patches it has."""
    return max(1, sum(math.prod(n.outputs[0].space.extent) for n in nodes if isinstance(n.op, Source)))


def references(plan: Plan, nodes: Sequence[Node]) -> tuple[tuple[int, ...], ...]:
    """The map of each segment whose cuts the others follow."""
    return tuple(reference_of([t.map.space.extent for t in targets]) for targets in resolve(plan, nodes))


def tell_apart(nodes: Sequence[Node], examples: Sequence[Example]) -> bool:
    """Whether examples show what depends on an image's size: it differs on every axis, every map differs with it, and
    no vector has the size of a side."""
    values = [v for n in nodes for v in n.outputs]
    differ = (len(set(sizes)) > 1 for sizes in zip(*(e.bytes for e in examples), strict=True))
    axes = zip(*(e.image for e in examples), strict=True)
    return all(len(set(axis)) > 1 for axis in axes) and all(
        found == v.is_map or (v.is_map and math.prod(v.space.extent) == 1)
        for v, found in zip(values, differ, strict=True)
    )


def worst_of(plan: Plan, network: Network) -> Worst:
    """The sizes of the worst tiles of a plan's grids."""
    made: set[int] = set()
    found: list[tuple[tuple[int, ...], ...]] = []
    for segment, targets in zip(plan.segments, resolve(plan, network.nodes), strict=True):
        if not segment.keep:
            program = Program.build(targets, lambda v: id(v) in made)
            for grid in (segment.forward, segment.backward):
                found.append(
                    network.repeats.once(program, ("worst", grid), partial(sizes_of_worst, program, grid, network))
                )
        made.update(id(v) for t in targets for v in t.node.outputs if v.is_map)
    return tuple(found)


def sizes_of_worst(program: Program, grid: Grid, network: Network) -> tuple[tuple[int, ...], ...]:
    return tuple(c.sizes for c in heaviest(candidates(program, grid), effort(network)))


def kinds_of(plan: Plan, nodes: Sequence[Node]) -> Kinds:
    found = []
    for s, extent in zip(plan.segments, references(plan, nodes), strict=True):
        for grid in () if s.keep else (s.forward, s.backward):
            sides = tuple(min(side, size) for side, size in zip(sides_of(grid, extent), extent, strict=False))
            found.append((sides, grid.tiles > FEW, s.tier == "host"))
    return tuple(found)


def sides_of(grid: Grid, extent: Sequence[int]) -> tuple[int, ...]:
    """The sides of a grid's tiles on a map."""
    return grid.sides or tuple(-(-size // count) for size, count in zip(extent, grid.counts, strict=False))


def grid_at(segment: SegmentPlan, grid: Grid, was: Sequence[int], now: Sequence[int]) -> Grid:
    """A grid of tiles with the sides they had where a segment's map had other extents. A segment that shares halos
    stays cut along one axis: on others its tiles are as long as the map."""
    sides = sides_of(grid, was)
    if segment.halo == "share":
        cut = zip(sides, grid.counts, now, strict=False)
        sides = tuple(side if count > 1 else size for side, count, size in cut)
    return Grid(tuple(-(-size // side) for size, side in zip(now, sides, strict=False)), sides)
