"""Where the order may be cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from lightning_plugin.planner.analysis.network import Network, is_given
from lightning_plugin.planner.costs.lower import Lower
from lightning_plugin.planner.costs.rates import Rates
from lightning_plugin.planner.search.images import few, free_stages
from lightning_plugin.planner.search.interval import Intervals
from lightning_plugin.planner.search.policies import Policy
from lightning_plugin.program.fixed import is_entire
from lightning_plugin.program.recall import is_unread

#: Cuts inside stages that are considered; of more, those where least is alive.
MOST_CUTS = 48


class Cuts:
    """The places where the order of one network may be cut, as a policy has it."""

    def __init__(self, intervals: Intervals, policy: Policy, rates: Rates, lower: Lower) -> None:
        self.intervals = intervals
        self.network = intervals.network
        self.policy = policy
        self.rates = rates
        self.lower = lower
        self._free: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}

    def free(self, budget: int, fixed: int) -> dict[int, tuple[int, int]]:
        """The stages in which images are on their own, where so much of a budget is fixed."""
        key = budget, fixed
        if key not in self._free:
            self._free[key] = free_stages(self.intervals, budget - fixed)
        return self._free[key]

    def among(self, free: Mapping[int, tuple[int, int]], streaming: bool) -> list[int]:
        """Of all places, a few inside stages in which images are on their own; those that keys need, where they are
        read piece by piece."""
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
    """Cuts with those behind operators that are pulled back without their results, as far as all that lies between is
    done again at little cost: in their place where no more is alive there, else beside them. See [Note: unread] in
    `rules.unread`."""
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
    """The bytes that are alive at each place, beside what was given."""
    return [sum(v.bytes for v in maps if not is_given(v)) for maps in network.alive]


def heavy(network: Network, cut: int) -> bool:
    """Whether real work begins at a cut; a cut before an activation would only store what follows from less."""
    return network.order[cut].op.kind in ("window", "resample")
