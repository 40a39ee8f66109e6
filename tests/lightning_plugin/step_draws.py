"""Random steps: what hypothesis draws, and which combinations have no one right answer and are not drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tests.lightning_plugin.step_parts import ASKS, CONVOLUTIONS, EDITS, EXACT, LAYERS, NORMS, POOLS, RUNNING, SMALLS
from tests.lightning_plugin.steps import (
    Action,
    Ask,
    Backward,
    Call,
    Change,
    Drop,
    Image,
    Network,
    Nudge,
    Statistics,
    Step,
    Way,
)

Draw = Callable[..., Any]
Term = tuple[int, int]

SHRINKING = ("down3", "max pool", "average pool")
ALIKE = ("repeated", "mirrored", "margins", "constant")


def one_in(draw: Draw, n: int) -> bool:
    return bool(draw(st.integers(0, n - 1)) == n - 1)  # the simple case is the one hypothesis shrinks to


@st.composite
def steps(draw: Draw, dtypes: Sequence[str] = ("float64",), asking: bool = False) -> Step:
    """Draw a step; with ``asking``, values are asked for within networks, under budgets that keep all, some and no
    parts as often as under grids."""
    dtype = draw(st.sampled_from(dtypes))
    whole = one_in(draw, 7)
    nets = tuple(network(draw, whole, first=i == 0) for i in range(draw(st.sampled_from([1, 1, 2, 2, 3]))))
    images = tuple(mended(image(draw, whole), nets) for _ in range(draw(st.sampled_from([1, 1, 2, 3]))))
    way = draw(ways())
    if asking:
        nets = tuple(replace(net, asks=asks(draw, net)) for net in nets)
        way = replace(way, budget=draw(st.sampled_from([None, 20, 60, 120, 200, 300, 450, 600, 1000, 100_000])))
        way = replace(way, budget=way.budget and 1024 * way.budget)
        if len(nets) > 1 and way.budget:  # each TiledModule has a budget of its own, which knows nothing of the others'
            way = replace(way, calls="lazy")
    done = actions(draw, nets, images)
    if asking and way.budget:  # if tiles of a second pass fit beside a retained graph is estimated
        done = tuple(replace(a, twice=False) if isinstance(a, Backward) else a for a in done)
    step = Step(dtype, images, nets, done, way, draw(st.sampled_from([4, 6])), whole, draw(st.integers(0, 999)))
    return answerable(step)


def image(draw: Draw, whole: bool) -> Image:
    side = draw(st.integers(12, 33)), draw(st.integers(12, 40))
    content = "whole" if whole else draw(st.sampled_from(["noise", "noise", "repeated", "repeated", *ALIKE]))
    kind = draw(st.sampled_from(["tensor", "tensor", "leaf", "source"]))
    fails = draw(st.integers(1, 12)) if kind == "source" and one_in(draw, 3) else None
    return Image(side, content, draw(st.sampled_from([1, 1, 2])), kind, fails)


def mended(image: Image, nets: Sequence[Network]) -> Image:
    """Which of equal pixels a maximum's gradient goes to is a matter of the last digit: there, it is not asked for. A
    constant map has no statistics but rounding errors."""
    names = {name for net in nets for name in (*net.layers, *net.pools)}
    if image.content == "constant" and names & {*NORMS, "std"}:
        image = replace(image, content="margins")
    selects = "max pool" in names or any(POOLS[p].selects for net in nets for p in net.pools)
    if image.content in ALIKE and selects and image.kind == "leaf":
        image = replace(image, kind="tensor")
    return image


def network(draw: Draw, whole: bool, first: bool) -> Network:
    layers = [draw(st.sampled_from([c for c in CONVOLUTIONS if not whole or c in EXACT]))]
    names = EXACT if whole else tuple(LAYERS)
    for _ in range(draw(st.integers(0, 4))):
        name = draw(st.sampled_from(names))
        if not (name in SHRINKING and sum(n in SHRINKING for n in layers) == 2) and not (
            name == "up" and "up" in layers
        ):
            layers.append(name)
    pools = [p for p in POOLS if not (whole and (POOLS[p].any_tie or not POOLS[p].selects))]
    drawn = tuple(draw(st.sampled_from(pools)) for _ in range(draw(st.sampled_from([1, 1, 2]))))
    edit = draw(st.sampled_from([e for e in EDITS if not (whole and "mean" in e)])) if one_in(draw, 3) else "nothing"
    if EDITS[edit].writes and one_in(draw, 2):
        layers.append("conv1")  # whose result backward does not need
    small = draw(st.sampled_from(list(SMALLS))) if one_in(draw, 3) else "nothing"
    inside = draw(st.sampled_from(["checkpoint", "functional_call"])) if one_in(draw, 5) else "nothing"
    if inside == "checkpoint":  # plain PyTorch does not see there that what backward needs was written over
        layers = ["relu" if n == "relu_" else n for n in layers]
        layers = ["batch" if n in RUNNING else n for n in layers]  # docs/how-to/lightning-features.md says of others
    returns = draw(st.sampled_from(["vector", "vector", "map"]))
    return Network(tuple(layers), drawn, edit, small, returns, not first and one_in(draw, 3), inside, one_in(draw, 6))


def asks(draw: Draw, net: Network) -> tuple[tuple[int, str], ...]:
    """Values that are asked for in a network, one or two; whole numbers that are scaled would be whole no longer."""
    place = st.integers(0, len(net.layers) - 1)
    return tuple(draw(st.tuples(place, st.sampled_from(sorted(ASKS)))) for _ in range(draw(st.sampled_from([1, 1, 2]))))


def ways() -> st.SearchStrategy[Way]:
    grids = st.tuples(st.integers(1, 4), st.integers(1, 4))
    return st.builds(
        Way,
        calls=st.sampled_from(["tiled", "lazy", "both"]),
        tiles=grids,
        backward_tiles=st.none() | grids,
        budget=st.integers(0, 7).flatmap(lambda n: st.none() if n else st.integers(20, 600).map(lambda k: 1024 * k)),
    )


def actions(draw: Draw, nets: Sequence[Network], images: Sequence[Image]) -> tuple[Action, ...]:
    """Calls, then losses; with whatever else happens in between."""
    found: list[Action] = []
    terms: list[Term] = []
    calls = max(len(nets), draw(st.integers(1, 4)))
    for i in range(calls):
        n = i if i < len(nets) else draw(st.integers(0, len(nets) - 1))
        how = draw(st.sampled_from(["train", "train", "train", "train", "no_grad", "frozen", "eval"]))
        found.append(Call(n, draw(st.integers(0, len(images) - 1)), how))
        between(draw, found, nets, images)
        mine = [(i, part) for part in range(len(nets[n].pools))]
        if one_in(draw, 7):
            found.append(Drop(i))
            between(draw, found, nets, images)
            continue
        if one_in(draw, 5):
            found.append(Ask(i))
        if one_in(draw, 5):  # at once, as in training that takes turns
            found.append(Backward(tuple(mine), retain=one_in(draw, 4), twice=one_in(draw, 4)))
        else:
            terms += mine
    for group, later in groups(draw, terms):
        between(draw, found, nets, images)
        again = bool({c for c, _ in group} & {c for c, _ in later})
        product = len(group) == 2 and fits(group, found, images) and one_in(draw, 2)
        found.append(Backward(group, again or one_in(draw, 5), one_in(draw, 5), product))
    between(draw, found, nets, images)
    return tuple(found)


def groups(draw: Draw, terms: list[Term]) -> list[tuple[tuple[Term, ...], list[Term]]]:
    """The results in any order, in some losses; with each, what comes later."""
    order = draw(st.permutations(terms))
    found = []
    while order:
        size = draw(st.integers(1, len(order)))
        found.append((tuple(order[:size]), list(order[size:])))
        order = order[size:]
    return found


def fits(group: Sequence[Term], found: Sequence[Action], images: Sequence[Image]) -> bool:
    calls = [a for a in found if isinstance(a, Call)]
    first, second = (images[calls[c].image].batch for c, _ in group)
    return first == second


def between(draw: Draw, found: list[Action], nets: Sequence[Network], images: Sequence[Image]) -> None:
    """Now and then something that nobody should do, or few."""
    n = draw(st.integers(0, len(nets) - 1))
    what = draw(st.integers(0, 29))
    if what == 29:
        tensors = [i for i, image in enumerate(images) if image.kind != "source"]
        if tensors:
            found.append(Change(draw(st.sampled_from(tensors))))
    elif what == 28:
        found.append(Nudge(n))
    elif what in (26, 27) and any(layer in RUNNING for layer in nets[n].layers):
        found.append(Statistics(n, draw(st.sampled_from(["read", "reset"]))))


def answerable(step: Step) -> Step:
    """Without what has no right answer.

    A source that fails ends the step and begins it again: only where nothing was changed meanwhile, and no running
    statistics are read by a call. PyTorch does not see that a batch in train mode changes the statistics that an
    earlier call in eval mode needs for backward, and computes a wrong gradient: eval mode stays. A checkpointed block
    is computed again in the mode of the last call: it is always train mode.
    """
    running = {i for i, n in enumerate(step.networks) if any(layer in RUNNING for layer in n.layers)}
    fails = any(i.fails for i in step.images)
    if fails and any(isinstance(a, (Change, Nudge)) for a in step.actions):
        step = replace(step, images=tuple(replace(i, fails=None) for i in step.images))
        fails = False
    evaluating: set[int] = set()
    found: list[Action] = []
    for action in step.actions:
        if isinstance(action, Call) and action.network in running:
            if action.how == "eval" and (fails or step.networks[action.network].inside == "checkpoint"):
                action = replace(action, how="train")
            elif action.network in evaluating:
                action = replace(action, how="eval")
            if action.how == "eval":
                evaluating.add(action.network)
        found.append(action)
    return replace(step, actions=tuple(found))
