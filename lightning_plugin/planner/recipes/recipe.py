"""A plan for one size, made one for another.

[Note: recipe] What a plan decides (where the network is cut, what is kept, where maps lie, how large tiles are) does
not depend on an image's exact size. A *recipe* is a plan with the size it was made for: at another size its tiles have
the sides they had, and there are as many as it takes; maps that leave the device go where there is room for them. What
the plan holds there is known by *formula*, chapter by chapter of what rehearsals have noted: see [Note: chapters] in
`chapter`. So the first size is searched for and rehearsed, the second rehearsed, and others are looked up. A size where
some chapter has no formula yet, or none that is near enough, is rehearsed, and teaches what it is.

Where two rehearsals do not agree in what they note and in which order, or where a vector has the size of an image's
side, there is no formula, and each size is rehearsed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lightning_plugin.boxes import Grid
from lightning_plugin.graph import Node
from lightning_plugin.plan import Plan, SegmentForecast, SegmentPlan
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.costs.lower import Lower
from lightning_plugin.planner.costs.rates import Rates
from lightning_plugin.planner.recipes.chapter import Chapter, chapters, terms_of
from lightning_plugin.planner.recipes.formula import Formula
from lightning_plugin.planner.recipes.retier import retiered
from lightning_plugin.planner.recipes.size import Size, Traits, image_of, positions, references, tell_apart
from lightning_plugin.planner.rehearsal.account import Account, Reading, account
from lightning_plugin.planner.rehearsal.rehearse import noted
from lightning_plugin.planner.search.predict import Work, with_tiers, works
from lightning_plugin.stretch import Note

#: An image may have so many times the positions of the one that a recipe was made for, or so many times fewer: beyond,
#: other decisions are worth a search.
NEAR = 1.2
#: The most that a plan can hold, by formula, may be so many times the least.
CLOSE = 1.0099
#: The rehearsals that are remembered, the latest.
MOST_REHEARSALS = 32


@dataclass(frozen=True)
class Rehearsed:
    """What a rehearsal noted at a size."""

    size: Size
    notes: tuple[Note, ...]

    @cached_property
    def chapters(self) -> tuple[Chapter, ...]:
        return chapters(self.notes)


@dataclass(eq=False)
class Recipe:
    """A plan, and what was seen of it at the sizes it was used for: ``image`` are the extents of the images it was made
    for, ``references`` the smallest maps of its segments there."""

    plan: Plan
    image: tuple[int, ...]
    references: tuple[tuple[int, ...], ...]
    positions: int
    rehearsed: list[Rehearsed] = field(default_factory=list)
    #: How many sizes were rehearsed.
    taught: int = 0
    #: The fewest positions of an image with which the plan did not keep the budget.
    too_large: float = math.inf
    _formulas: dict[tuple[int, tuple[Traits, ...]], Formula | None] = field(default_factory=dict, init=False)
    _work: tuple[int, list[Work]] | None = field(default=None, init=False)

    @staticmethod
    def of(plan: Plan, network: Network, notes: Sequence[Note]) -> Recipe:
        """The recipe of a plan that was rehearsed."""
        nodes = network.nodes
        recipe = Recipe(plan, image_of(nodes), references(plan, nodes), positions(nodes))
        recipe.learn(Size.of(plan, network), notes)
        return recipe

    def distance(self, nodes: Sequence[Node]) -> float:
        """How many times larger or smaller an image is."""
        ratio = positions(nodes) / self.positions
        return max(ratio, 1 / ratio)

    def at(self, network: Network, rates: Rates, lower: Lower, room: float = math.inf) -> Plan | None:
        """The plan for a network of the same structure and another size, if there is room for its maps below. Where it
        holds more than there is ``room`` for on the device, it need not say how much more."""
        nodes = network.nodes
        if image_of(nodes) == self.image:
            return self.plan
        plan = self.resized(nodes)
        found = retiered(plan, network, lower)
        if found is None:
            return None
        foretold = self.known(found, network, room)
        if found == plan:
            return foretold
        work = self.work(plan, network, rates)
        was, now = (sum(with_tiers(p, network, rates, work)) for p in (plan, found))
        forecast = dataclasses.replace(foretold.forecast, seconds=foretold.seconds * now / was)
        return dataclasses.replace(foretold, forecast=forecast)

    def work(self, plan: Plan, network: Network, rates: Rates) -> list[Work]:
        """The work of each segment: what it was at the first size that this was asked at, in proportion."""
        size = positions(network.nodes)
        self._work = self._work or (size, works(plan, network, rates))
        was, work = self._work
        return [one.times(size / was) for one in work]

    def known(self, plan: Plan, network: Network, room: float) -> Plan:
        """A plan for another size with its forecast, by formula or by a rehearsal."""
        nodes, size = network.nodes, Size.of(plan, network)
        for former in self.rehearsed:
            if former.size == size:
                return self.foretold(plan, account(former.notes), nodes)
        found = self.by_formula(size, nodes, room - plan.forecast.reserve_bytes)
        if found is None:
            notes = noted(plan, network)
            self.learn(size, notes)
            found = account(notes)
        return self.foretold(plan, found, nodes)

    def by_formula(self, size: Size, nodes: Sequence[Node], room: float) -> Account | None:
        """What is held at a size, where formulas of all chapters say so well enough, or say that there is no room."""
        listed = [former.chapters for former in self.rehearsed]
        notes: list[Note] = []
        least: list[int] = []
        most: list[int] = []
        for place in range(len(listed[0]) if len(set(map(len, listed))) == 1 else 0):
            formula = self.formula(place, size, nodes)
            bounds = None if formula is None else formula.bounds(size)
            if formula is None or bounds is None:
                return None
            notes += formula.chapter.notes
            least += bounds[0]
            most += bounds[1]
        if not notes:
            return None
        at_least, at_most = (Reading().read(notes, sizes) for sizes in (least, most))
        if at_least.peak > room:
            return at_least
        return at_most if at_most.peak <= CLOSE * at_least.peak else None

    def formula(self, place: int, size: Size, nodes: Sequence[Node]) -> Formula | None:
        """The formula of a chapter where it has the traits that it has at a size. Its terms are those of all rehearsals
        with as many tiles; what tiles need, only those with the same traits say."""
        traits = self.rehearsed[0].chapters[place].traits(size)
        if (place, traits) not in self._formulas:
            listed = [(former.size, former.chapters[place]) for former in self.rehearsed]
            similar = [(s, c) for s, c in listed if many(c.traits(s)) == many(traits)]
            same = [(s, c) for s, c in listed if c.traits(s) == traits]
            apart = len(similar) > 1 and tell_apart(nodes, [s for s, _ in similar])
            terms = terms_of(similar) if same and apart else None
            self._formulas[place, traits] = None if terms is None else Formula.of(same, terms)
        return self._formulas[place, traits]

    def learn(self, size: Size, notes: Sequence[Note]) -> None:
        """Take a rehearsal as an example, and forget the formulas that it has a say in."""
        self.rehearsed.append(Rehearsed(size, tuple(notes)))
        self.taught += 1
        told = {(place, many(c.traits(size))) for place, c in enumerate(self.rehearsed[-1].chapters)}
        if len(self.rehearsed) > MOST_REHEARSALS:
            del self.rehearsed[0]
            self._formulas.clear()
        self._formulas = {key: f for key, f in self._formulas.items() if (key[0], many(key[1])) not in told}

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


def many(traits: Sequence[Traits]) -> tuple[tuple[bool, ...], ...]:
    """Whether segments have many tiles: on it depends what their notes are in proportion to."""
    return tuple(one.many for one in traits)


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
