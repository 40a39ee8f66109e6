"""The states of residents: what moves are legal, and that those who have a state keep to them."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_plugin.boxes import Box
from lightning_plugin.layout import Layout
from lightning_plugin.residency.boundary import Boundary
from lightning_plugin.residency.cotangent import Cotangent
from lightning_plugin.residency.states import Life, State
from lightning_plugin.residency.tiers import Home
from lightning_plugin.residency.transfer import Arrivals, Courier, Transfer

CPU = torch.device("cpu")
LAYOUT = Layout.channels_first((1, 2, 4, 6))
WHOLE = Box((0, 0), (4, 6))

#: Each walk that a resident or its part may take, as design says it: not read from the table that is tested.
WALKS = [
    [State.UNMADE, State.HOME, State.UNMADE, State.HOME],
    [State.HOME, State.COMING, State.HERE, State.HOME],
    [State.HERE, State.GOING, State.HOME, State.COMING],
]


@pytest.mark.parametrize("walk", WALKS)
def test_a_life_goes_on_as_designed(walk: list[State]) -> None:
    life: Life[str] = Life(walk[0])
    for state in walk[1:]:
        life.to(state, state.value)
        assert (life.state, life.holder) == (state, state.value)


@given(st.sampled_from(State), st.sampled_from(State))
def test_any_other_move_is_an_error(before: State, after: State) -> None:
    legal = {pair for walk in WALKS for pair in itertools.pairwise(walk)}
    life: Life[str] = Life(before, "held")
    if (before, after) in legal:
        life.to(after)
    else:
        with pytest.raises(AssertionError, match=f"{before.value} cannot be {after.value}"):
            life.to(after)
        assert (life.state, life.holder) == (before, "held")


def test_a_transfer_is_waited_for_once() -> None:
    sent = Courier().send(Transfer([], lambda: None), ahead=False)
    sent.wait()
    with pytest.raises(AssertionError, match="once"):
        sent.wait()


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_dropped_boundary_is_made_again_once_and_not_read_before(tier: str) -> None:
    boundary = Boundary(LAYOUT, torch.float32, CPU, Home(tier, Courier()))
    boundary.write([WHOLE], torch.ones(1, 2, 4, 6))
    boundary.let_go()
    assert not boundary.gone, "what cannot be made again stays"

    class Maker:
        depth = 1
        calls = 0

        def __call__(self, deepest: int) -> None:
            self.calls += 1
            boundary.make_room()
            boundary.write([WHOLE], torch.full((1, 2, 4, 6), 2.0))

    boundary.again = maker = Maker()
    for _ in range(2):
        boundary.let_go()
    assert boundary.gone
    with pytest.raises(AssertionError, match="let go"):
        boundary.read(WHOLE)
    for _ in range(2):
        boundary.bring_back()
    assert maker.calls == 1 and bool((boundary.read(WHOLE) == 2).all())
    with pytest.raises(AssertionError, match="at home cannot be at home"):
        boundary.make_room()


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_cotangent_begins_at_nothing_each_time(tier: str) -> None:
    cotangent = Cotangent(LAYOUT, torch.float32, CPU, Home(tier, Courier()))
    for _ in range(2):
        with pytest.raises(AssertionError, match="before anything was added"):
            cotangent.read(WHOLE)
        cotangent.add(WHOLE, torch.ones(1, 2, 4, 6))
        cotangent.add(WHOLE, torch.ones(1, 2, 4, 6))
        assert bool((cotangent.read(WHOLE) == 2).all())
        cotangent.clear()
        cotangent.clear()


@pytest.mark.parametrize("ahead", [False, True])
def test_what_was_fetched_ahead_is_taken_once(ahead: bool) -> None:
    courier, arrivals, fetched = Courier(ahead), Arrivals[str](), []

    def fetch() -> object:
        fetched.append(len(fetched))
        held = [torch.tensor(float(len(fetched)))]
        return courier.send(Transfer(held, lambda: None, lambda: held[0]), ahead)

    arrivals.begin("a", fetch)  # type: ignore[arg-type]
    arrivals.begin("a", fetch)  # type: ignore[arg-type]
    assert arrivals.take("a", fetch) == 1 and arrivals.take("a", fetch) == 2  # type: ignore[arg-type]
    arrivals.begin("b", fetch)  # type: ignore[arg-type]
    arrivals.rest()
    assert "b" not in arrivals and len(fetched) == 3
