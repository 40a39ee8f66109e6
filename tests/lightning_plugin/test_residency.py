"""Boundaries, cotangents and transfers: what is let go is not used, and what is fetched is taken once."""

from __future__ import annotations

import pytest
import torch

from lightning_plugin.boxes import Box
from lightning_plugin.layout import Layout
from lightning_plugin.residency.boundary import Boundary, Cotangent
from lightning_plugin.residency.tiers import Home
from lightning_plugin.residency.transfer import Arrivals, Transfer, TransferQueue

CPU = torch.device("cpu")
LAYOUT = Layout.channels_first((1, 2, 4, 6))
WHOLE = Box((0, 0), (4, 6))


def test_a_transfer_is_waited_for_once() -> None:
    sent = TransferQueue().send(Transfer([], lambda: None), ahead=False)
    sent.wait()
    with pytest.raises(AssertionError, match="once"):
        sent.wait()


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_dropped_boundary_is_made_again_once_and_not_read_before(tier: str) -> None:
    boundary = Boundary(LAYOUT, torch.float32, CPU, Home(tier, TransferQueue()))
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
    with pytest.raises(AssertionError, match="has room already"):
        boundary.make_room()


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_cotangent_begins_at_nothing_each_time(tier: str) -> None:
    cotangent = Cotangent(LAYOUT, torch.float32, CPU, Home(tier, TransferQueue()))
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
    queue, arrivals, fetched = TransferQueue(ahead), Arrivals[str](), []

    def fetch() -> object:
        fetched.append(len(fetched))
        held = [torch.tensor(float(len(fetched)))]
        return queue.send(Transfer(held, lambda: None, lambda: held[0]), ahead)

    arrivals.begin("a", fetch)  # type: ignore[arg-type]
    arrivals.begin("a", fetch)  # type: ignore[arg-type]
    assert arrivals.take("a", fetch) == 1 and arrivals.take("a", fetch) == 2  # type: ignore[arg-type]
    arrivals.begin("b", fetch)  # type: ignore[arg-type]
    arrivals.rest()
    assert "b" not in arrivals and len(fetched) == 3
