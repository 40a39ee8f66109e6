"""The parts in which recorded values run, where calls have recorded them under settings of their own.

[Note: settings] A plan is made for all that runs at once, by one budget. So nodes of calls with other settings run one
part after the other. Parts meet in vectors, which the first part hands to the next as ordinary tensors. A map is never
whole, so what reads a map belongs to the call that made it; where two such calls meet in maps, they are refused. What
no call has recorded and reads no map of a call runs with whatever part comes to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_plugin.capture.session import ExecutionSettings, Session
from lightning_plugin.errors import RecordingError
from lightning_plugin.graph import Node, Value, ancestors


def part(session: Session, values: Sequence[Value]) -> tuple[ExecutionSettings | None, Sequence[Value], bool]:
    """The settings by which values, or what has to run before them, run next; which values do; and whether others are
    left for later."""
    if not session.calls:
        return session.settings, values, False
    nodes = ancestors(values, session.vectors)
    kinds: dict[Node, ExecutionSettings | None] = {}
    found: list[ExecutionSettings] = []
    for node in nodes:
        kind = settings_of(node, session, kinds)
        kinds[node] = kind = next((other for other in found if kind is not None and other.same(kind)), kind)
        if kind is not None and kind not in found:
            found.append(kind)
    if len(found) < 2:
        return found[0] if found else session.settings, values, False

    needs: dict[Node, set[ExecutionSettings]] = {}
    for node in nodes:
        kind = kinds[node]
        needs[node] = set() if kind is None else {kind}
        needs[node].update(*(needs[made] for made in makers(node.inputs, session)))
    crossing = (v for n in nodes for v in n.vectors if v.node is not None and kinds.get(v.node) not in (None, kinds[n]))
    left = [v for v in dict.fromkeys((*crossing, *values)) if v not in session.vectors]
    # Some come from the calls of one module alone, since what is recorded points backwards only.
    alone = {v: needs[made] for v in left for made in makers([v], session) if len(needs[made]) == 1}
    now = next(iter(alone.values()))
    return next(iter(now)), [v for v, needed in alone.items() if needed == now], True


def makers(values: Iterable[Value], session: Session) -> list[Node]:
    """The nodes that have to run for some values."""
    return [v.node for v in values if v.node is not None and v not in session.vectors]


def settings_of(node: Node, session: Session, kinds: dict[Node, ExecutionSettings | None]) -> ExecutionSettings | None:
    """The settings of the call that recorded a node, or the maps that it reads."""
    if not node.maps:
        return None
    own = [call.settings for call in session.calls if node in call][:1]
    made = [kind for v in node.maps if v.node in kinds and (kind := kinds[v.node]) is not None]
    met = [*made, *own]
    for other in met[1:]:
        if not other.same(met[0]):
            raise RecordingError(
                f"{node.label} reads maps of a TiledModule with {met[0]} and of one with {other}: they would be run "
                "together, under one plan. Take the first map whole where it fits (materialize(x)), give both modules "
                "the same options, or wrap both in one TiledModule."
            )
    return met[0] if met else None
