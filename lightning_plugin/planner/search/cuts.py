"""Places where the order may be cut.

[Note: images] Some stages have no operator that mixes the positions of an axis (the images of a batch, the patches of a
bag or of an image). There a tile may hold a few of these positions through the whole stage: however long the stage is,
there is no halo, and nothing has to be stored inside. If one position through the whole stage takes little of the
budget, the search tries few cuts inside it, and segments of any length: a chain of forty transformer blocks is planned
like one of four.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from lightning_plugin.boxes import Grid
from lightning_plugin.planner.analysis.network import Network, is_given
from lightning_plugin.planner.costs.grids import carried
from lightning_plugin.planner.costs.lower import LowerTiers
from lightning_plugin.planner.costs.peak import TiledInterval
from lightning_plugin.planner.costs.rates import Rates
from lightning_plugin.planner.search.interval import Intervals
from lightning_plugin.planner.search.policies import Policy
from lightning_plugin.program.fixed import is_entire
from lightning_plugin.program.recall import is_unread

#: Cuts inside stages that are considered; of more, those at which least is alive.
MOST_CUTS = 48
#: The share of a budget that one position may take.
PART = 1 / 4
#: Cuts that are tried inside a stage with more than ``MANY``.
CUTS, MANY = 7, 16


class Cuts:
    """The places where the order of one network may be cut under a policy."""

    def __init__(self, intervals: Intervals, policy: Policy, rates: Rates, lower: LowerTiers) -> None:
        self.intervals = intervals
        self.network = intervals.network
        self.policy = policy
        self.rates = rates
        self.lower = lower
        self._free: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}

    def free(self, budget: int, fixed: int) -> dict[int, tuple[int, int]]:
        """The stages whose images are independent, under a budget of which so many bytes are fixed."""
        key = budget, fixed
        if key not in self._free:
            self._free[key] = free_stages(self.intervals, budget - fixed)
        return self._free[key]

    def among(self, free: Mapping[int, tuple[int, int]], streaming: bool) -> list[int]:
        """The cuts that are tried: all but most of those inside free stages; with those that reading keys piece by
        piece needs."""
        keys = self.network.key_cuts if streaming else set()
        if not free or self.policy.cuts == "stages":
            return sorted({*self.all} | keys)
        size = sizes(self.network)
        inside = {i for begin, end in free.values() for i in self.all if begin < i < end}
        some = (few([i for i in self.all if begin < i < end], size) for begin, end in free.values())
        return sorted({*self.all} - inside | {i for cuts in some for i in cuts} | keys)

    @cached_property
    def all(self) -> list[int]:
        """Every change of stage, and inside a stage where little is alive."""
        must = changes(self.network)
        if self.policy.cuts == "stages":
            return sorted(must)
        if callable(self.policy.cuts):
            return sorted(must | set(self.policy.cuts(self)))
        inside = valleys(self.network, must)
        return sorted(must | with_unread(self.network, inside, must))


def changes(network: Network) -> set[int]:
    """The ends of the order, and every change of stage: cuts that every plan has."""
    order, stage = network.order, network.stage
    end = len(order)
    return {0, end} | {i for i in range(1, end) if stage[order[i].serial] != stage[order[i - 1].serial]}


def valleys(network: Network, must: set[int]) -> list[int]:
    """Cuts inside stages where little is alive."""
    alive, size = network.alive, sizes(network)
    found = [
        i
        for i in range(1, len(network.order))
        if i not in must
        and not any(map(is_entire, alive[i]))
        and size[i] <= size[i - 1]
        and (size[i] < size[i + 1] or (size[i] <= size[i + 1] and heavy(network, i)))
    ]
    return sorted(found, key=lambda i: size[i])[:MOST_CUTS] if len(found) > MOST_CUTS else found


def with_unread(network: Network, cuts: Sequence[int], must: set[int]) -> set[int]:
    """Cuts with those behind operators that are pulled back without their results, if only cheap operators lie between:
    in place of the first if no more is alive there, else beside it. See [Note: unread] in `rules.unread`."""
    size, found = sizes(network), set(cuts)
    for cut in cuts if network.trains else ():
        unread = unread_before(network, cut, must)
        if unread is not None:
            found.add(unread)
            if size[unread] <= size[cut]:
                found.discard(cut)
    return found


def unread_before(network: Network, cut: int, must: set[int]) -> int | None:
    """The nearest place before a cut where a segment may end with a result that its backward does not need."""
    for i in range(cut, 0, -1):
        made = network.order[i - 1]
        if i in must:
            break
        if made.outputs[0].requires_grad and is_unread(made):
            return i
        if network.profiles[made.serial].flops:
            break
    return None


def sizes(network: Network) -> list[int]:
    """Bytes that are alive at each place, beside the network's inputs."""
    return [sum(v.bytes for v in maps if not is_given(v)) for maps in network.alive]


def heavy(network: Network, cut: int) -> bool:
    """True if real work begins at a cut; a cut before an activation would only store a result of less."""
    return network.order[cut].op.kind in ("window", "resample")


def stages_of(network: Network) -> dict[int, tuple[int, int]]:
    """The interval of each stage in the order."""
    found: dict[int, tuple[int, int]] = {}
    for i, node in enumerate(network.order):
        stage = network.stage[node.serial]
        found[stage] = found.get(stage, (i, i))[0], i + 1
    return found


def free_stages(intervals: Intervals, room: int) -> dict[int, tuple[int, int]]:
    """Stages along whose images nothing is mixed, and one image of which takes little of the room."""
    network = intervals.network
    found = {}
    for stage, (begin, end) in stages_of(network).items():
        program = intervals.program(begin, end)
        axes = carried(network.order[begin:end]) if program is not None else frozenset()
        if program is None or not axes:
            continue
        grid = Grid(tuple(size if a in axes else 1 for a, size in enumerate(program.reference)))
        if grid.tiles > 1 and intervals.middle(TiledInterval(begin, end), grid, network.trains) <= PART * room:
            found[stage] = begin, end
    return found


def few(cuts: Sequence[int], size: Sequence[int]) -> list[int]:
    """A few of the cuts inside a stage, if there are many: at the least bytes and evenly apart."""
    if len(cuts) <= MANY:
        return list(cuts)
    least = min(size[i] for i in cuts)
    small = [i for i in cuts if size[i] <= 1.01 * least]
    step = max(1, -(-len(small) // CUTS))
    return small[step - 1 :: step]
