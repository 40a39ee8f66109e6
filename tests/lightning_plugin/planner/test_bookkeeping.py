"""The small sums that plans are made of: what is live, which partial plans are kept, what transfers and tiers take."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from benchmarks.published import paid
from lightning_plugin.boxes import Box, Grid
from lightning_plugin.constants import VARIED, Constants
from lightning_plugin.graph import Value
from lightning_plugin.options import Options
from lightning_plugin.plan import SegmentForecast, SegmentPlan
from lightning_plugin.planner import cache, calibrate
from lightning_plugin.planner.analysis.background import Background, reaches_of_position, summed, sums
from lightning_plugin.planner.analysis.optimizers import state_for
from lightning_plugin.planner.analysis.recorded import recorded
from lightning_plugin.planner.choose import Chooser, choose_plan
from lightning_plugin.planner.costs import lower as lower_module
from lightning_plugin.planner.costs.lower import (
    HOST,
    NO_MAPS,
    NONE,
    LowerMaps,
    LowerTiers,
    TransferTime,
    fetch_time,
    lower_tiers,
    offload_time,
    one_way,
)
from lightning_plugin.planner.costs.parameters import Copies, Streamed, captured
from lightning_plugin.planner.costs.peak import Allocations, tile_bytes
from lightning_plugin.planner.costs.rates import RATES, rates_of
from lightning_plugin.planner.rehearsal.representative import Candidate, heaviest
from lightning_plugin.planner.search.partial import (
    MOST_PARTIAL,
    Dropped,
    Front,
    Partial,
    evenly_thinned,
    is_nowhere_larger,
    merge_kept,
    pareto_front,
)
from lightning_plugin.planner.search.ways import TiledWay, with_transfers
from lightning_plugin.program.fixed import fixed_plan, kept_segments

# What is live


@given(st.lists(st.tuples(st.sampled_from(["make", "alias", "hold", "drop", "add", "passing"]), st.integers(0, 5),
                          st.integers(0, 9)), max_size=25))  # fmt: skip
def test_memory_is_let_go_when_the_last_that_holds_it_does(steps: list[tuple[str, int, int]]) -> None:
    life, holds, home, size = Allocations(), Counter[int](), dict[int, int](), dict[int, int]()
    sizes: list[int] = []
    beside = most = 0
    for number, (what, key, amount) in enumerate(steps):
        passing = 0
        name = 100 * number
        known = [k for k in home if holds[home[k]]]
        sizes.append(amount)
        if what == "make":
            life.make(name, number)
            home[name], size[name], holds[name] = name, amount, 1
        elif what == "add":
            life.add(number)
            beside += amount
        elif what == "passing":
            life.allocate_briefly(number)
            passing = amount
        elif known:
            one = known[key % len(known)]
            if what == "alias":
                life.alias(name, one)
                home[name] = home[one]
            elif what == "hold":
                life.hold(one)
            else:
                life.drop(one)
            holds[home[one]] += -1 if what == "drop" else 1
        live = beside + sum(size[k] for k in size if holds[k] > 0)
        most = max(most, live + passing)
    life.drop(-5)  # what was never there
    assert life.peak(np.array([*sizes, 0])) == most


def test_a_tile_takes_its_part_of_a_map() -> None:
    with recorded(nn.Conv2d(3, 4, 3), (1, 3, 22, 12), torch.float32) as (network, _):
        out = network.order[-1].maps[0]
        assert out.bytes == 4 * 4 * 20 * 10
        assert tile_bytes(out, Box((3, 5), (8, 10))) == 4 * 4 * 5 * 5
        assert tile_bytes(out, Box((3, 5), (3, 10))) == 0


def test_a_plan_of_one_grid_stores_maps_where_they_shrink() -> None:
    """And at every statistic; what is kept whole is one segment."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1),
                        nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, 2, 1), nn.AdaptiveAvgPool2d(1))  # fmt: skip
    with recorded(net, (1, 3, 32, 24), torch.float32) as (network, _):
        plan = fixed_plan(network.nodes, Grid((2,)), Grid((3, 1)))
        made = [[(network.nodes[t].name, network.nodes[t].outputs[0].shape[-1]) for t in s.targets]
                for s in plan.segments]  # fmt: skip
        assert [(s.forward, s.backward, s.keep) for s in plan.segments] == [(Grid((2, 2)), Grid((3, 1)), False)] * len(
            plan.segments
        )
        stored = [shape for targets in made for _, shape in targets if shape in (12, 6)]
        assert stored.count(12) >= 1 and stored.count(6) == 1 and len(plan.segments) >= 3
        (kept,) = kept_segments(network.nodes)
        assert kept.keep and kept.forward == Grid((1, 1)) and len(kept.targets) > 6
    assert kept_segments([]) == ()


# Which partial plans are kept

partials = st.lists(
    st.builds(
        Partial,
        keeps=st.integers(0, 9),
        seconds=st.integers(0, 9).map(float),
        peak=st.just(0),
        no_background=st.booleans(),
    ),
    min_size=1,
    max_size=20,
)


@given(partials)
def test_plans_that_others_beat_in_both_are_let_go(plans: list[Partial]) -> None:
    left = pareto_front(plans)

    def dominates(one: Partial, other: Partial) -> bool:
        return one.no_background == other.no_background and one.held <= other.held and one.seconds <= other.seconds

    assert all(any(dominates(kept, plan) for kept in left) for plan in plans)
    assert not any(dominates(one, other) for one in left for other in left if one is not other)
    assert all(any(kept is plan for plan in plans) for kept in left)


def test_what_is_dropped_counts_later() -> None:
    """A plan that holds less now, and more when what it dropped has come back, is kept beside one that does not."""
    stored = Partial(4, 5.0, 0)
    dropped = Partial(1, 5.0, 0, dropped=(Dropped(frozenset({1}), 9, 0, frozenset()),), back=3)
    assert dropped.levels == (1, 10) and dropped.held == stored.held
    assert pareto_front([stored, dropped]) == [stored, dropped]
    assert pareto_front([stored, Partial(5, 6.0, 0, dropped=dropped.dropped)]) == [stored]
    assert is_nowhere_larger((1, 2), (1, 2, 2)) and is_nowhere_larger((1,), (1, 2))
    assert not is_nowhere_larger((1, 3), (2,)) and not is_nowhere_larger((2,), (1, 3))


PLANS = st.builds(
    lambda keeps, back, seconds, size, depth, no_background: Partial(
        keeps, float(seconds), 0, back=back if depth else 0, no_background=no_background,
        dropped=(Dropped(frozenset({1}), size, 0, frozenset(), depth),) if depth else (),
    ),
    st.integers(0, 9), st.integers(0, 5), st.integers(0, 9), st.integers(0, 9), st.integers(0, 2), st.booleans(),
)  # fmt: skip


@given(st.lists(PLANS, max_size=20))
def test_what_is_beaten_when_it_comes_is_what_would_be_left_out(plans: list[Partial]) -> None:
    front = Front()
    for plan in plans:
        front.add(plan)
    front.prune()

    def figures(plans: list[Partial]) -> list[Any]:
        return [(p.no_background, p.keeps, p.back, p.seconds, p.levels) for p in plans]

    assert figures(front.plans) == figures(pareto_front(plans))


@pytest.mark.parametrize("count", [1, MOST_PARTIAL, MOST_PARTIAL + 1, 200])
def test_many_plans_are_thinned_evenly(count: int) -> None:
    plans: Any = list(range(count))
    left: Any = evenly_thinned(plans, MOST_PARTIAL)
    assert len(left) == min(count, MOST_PARTIAL) and (left[0], left[-1]) == (0, count - 1)
    steps = {b - a for a, b in pairwise(left)}
    assert not steps or max(steps) - min(steps) <= 1


def test_neighbours_that_are_kept_are_one_segment() -> None:
    def segment(targets: tuple[int, ...], path: str, keep: bool, n: int) -> SegmentPlan:
        forecast = SegmentForecast(
            stored_bytes=n, forward_bytes=10 * n, backward_bytes=5 - n, seconds=n / 2, copied_bytes=n
        )
        return SegmentPlan(targets, Grid((1, 1)), Grid((1, 1)), keep, path=path, forecast=forecast)

    a, b = segment((1, 2), "a … b", True, 1), segment((3,), "c … d", True, 2)
    tiled, last = segment((4,), "e", False, 3), segment((5,), "f", True, 4)
    merged, *others = merge_kept([a, b, tiled, last])
    assert (merged.targets, merged.path) == ((1, 2, 3), "a … d")
    found = merged.forecast
    assert (found.stored_bytes, found.forward_bytes, found.backward_bytes) == (3, 20, 4)
    assert (found.seconds, found.copied_bytes) == (1.5, 3)
    assert others == [tiled, last]


def test_of_tiles_those_are_rehearsed_that_no_other_holds() -> None:
    one, same, small, other = (Candidate((), sizes, sizes) for sizes in [(4, 4), (4, 4), (3, 4), (5, 1)])
    assert heaviest([one, same, small, other], 4) == [one, other]
    assert heaviest([small, other, one], 1) == [one]


# What transfers and tiers take


def test_transfers_are_waited_for_unless_they_go_ahead() -> None:
    """Those that the processors that compute have to make are waited for always."""
    one, two = TransferTime(beside=1), TransferTime(beside=2)
    assert two.with_work(3, False) == 5 and two.with_work(3, True) == 3 and two.with_work(1, True) == 2
    assert TransferTime(busy=2).with_work(3, False) == TransferTime(busy=2).with_work(3, True) == 5
    assert TransferTime(1, 4).with_work(3, True) == 5 and TransferTime(1, 4).times(2) + one == TransferTime(2, 9)
    assert with_transfers(3, None, one, two, False) == 6
    assert with_transfers(3, 4, one, two, False) == 17, "backward reads cotangents and input, and adds to what that has"
    assert with_transfers(3, 4, one, two, True) == 3 + 7


def test_files_are_work_of_the_processor_as_long_as_they_stay_in_memory() -> None:
    rates = dataclasses.replace(RATES["cpu"], disk=1.0, file=4.0, host=2.0, cache=100)
    assert offload_time(rates, NO_MAPS, "disk", 80) == TransferTime(busy=20)
    assert offload_time(rates, LowerMaps(disk_bytes=60), "disk", 80) == TransferTime(busy=10, beside=40)
    assert offload_time(rates, LowerMaps(disk_bytes=160), "disk", 80) == TransferTime(beside=80)
    assert offload_time(rates, NO_MAPS, "host", 80) == TransferTime(beside=40)
    assert fetch_time(rates, LowerMaps(disk_bytes=200), {1: 40, 2: 40}) == TransferTime(busy=10, beside=40)
    assert fetch_time(rates, LowerMaps(frozenset({1}), 40, 40), {1: 40, 2: 40}) == TransferTime(busy=10, beside=20)
    assert fetch_time(rates, NO_MAPS, {}) == NONE
    cuda = RATES["cuda"]
    assert not offload_time(cuda, NO_MAPS, "disk", 80).busy, (
        "a processor that does not compute copies beside the device"
    )


def test_what_a_tiled_segment_holds_in_each_way() -> None:
    """Rows that are handed on are held from forward on, where there is a way back."""
    cost: Any = SimpleNamespace(carried=5, bytes=7, seconds=1.0, work=2.0)
    back: Any = SimpleNamespace(carried=0, bytes=11, seconds=3.0, work=4.0)
    grid = Grid((2, 1))
    both = TiledWay("share", (grid, cost), (grid, back), ends=13, stored=17)
    assert (both.carried, both.forward_bytes, both.backward_bytes, both.peak) == (5, 29, 29, 29)
    assert (
        both.seconds,
        both.work,
        both.recompute_seconds(TransferTime(beside=2.0), False),
        both.recompute_seconds(TransferTime(beside=2.0), True),
    ) == (
        4.0,
        6.0,
        3.0,
        2.0,
    )
    alone = TiledWay("recompute", (grid, cost), None, ends=13, stored=17)
    assert (alone.carried, alone.forward_bytes, alone.backward_bytes, alone.peak) == (0, 24, 0, 24)
    assert (alone.seconds, alone.work) == (1.0, 2.0)


def test_tiers_below_are_filled_one_after_the_other() -> None:
    lower = LowerTiers(100, True, parameters=("host", "disk"))
    assert lower.tier(60, 40) == "host" and lower.tier(60, 41) == "disk"
    assert LowerTiers(100, False).tier(60, 41) is None and LowerTiers(None).tier(0, 1) == "disk"
    assert lower.tier_of_parameter(60, 40) == "host" and lower.tier_of_parameter(60, 41) == "disk"
    assert LowerTiers(100, parameters=("host",)).tier_of_parameter(60, 41) is None
    assert LowerTiers(100).there == "host" and LowerTiers(0).there == LowerTiers().there == "disk"
    sizes = {torch.float64: 10, torch.bfloat16: 20, torch.float32: 2}
    maps = [Value(torch.empty(size, dtype=dtype, device="meta"), None, False) for dtype, size in sizes.items()]
    assert LowerTiers().size(maps) == 128 and LowerTiers(half=True).size(maps) == 20 + 40 + 4
    rates = RATES["cpu"]
    assert one_way(rates, "host", 1000) == 1000 / rates.host and one_way(rates, "disk", 1000) == 1000 / rates.disk


@pytest.mark.parametrize("device", [None, "cpu", "cpu:0"])
def test_a_processor_has_no_host_below_it(device: str | None) -> None:
    lower = lower_tiers(device, Options())
    assert (lower.host, lower.disk, lower.parameters) == (None, True, ("disk",))


def test_the_host_below_an_accelerator_of_this_machine_is_half_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most; of one that is elsewhere nothing is known."""
    monkeypatch.setattr(lower_module, "machine_memory", lambda: 32 << 30)
    assert lower_tiers("cuda:a100", Options()).host == HOST
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [lower_tiers(name, Options()).host for name in ("cuda", "cuda:1", "cuda:a100")] == [16 << 30] * 2 + [HOST]
    assert lower_tiers("cuda", Options(host_budget=40 << 30)).host == 40 << 30


def test_an_accelerator_has() -> None:
    lower = lower_tiers("cuda:1", Options())
    assert (lower.host, lower.disk, lower.parameters) == (HOST, True, ("host", "disk"))
    lower = lower_tiers("cuda", Options.parse({"host_budget": 0, "disk": False}))
    assert (lower.host, lower.parameters, lower.tier(0, 1)) == (0, (), None)
    assert lower_tiers("cuda", Options.parse({"parameters": "device"})).parameters == ()


def test_a_cut_is_paid_for_by_the_operators_before_it() -> None:
    """Per stage: what was computed in one hides no transfer in the next."""
    nodes = [SimpleNamespace(serial=i) for i in range(8)]
    alive = [[SimpleNamespace(node=None, size=3)] for _ in range(9)]
    alive[2] = []
    network: Any = SimpleNamespace(order=nodes, stage={i: i // 5 for i in range(8)}, alive=alive)
    # A second each: after the third, and of the next stage, which begins with the sixth, none.
    assert list(paid(network, lambda node: 1.0, lambda maps: float(maps[0].size))) == [3]
    assert list(paid(network, lambda node: 3.0, lambda maps: float(maps[0].size))) == [1, 3, 4, 6, 7]
    assert list(paid(network, lambda node: 0.0, lambda maps: float(maps[0].size))) == []


@pytest.mark.parametrize("frozen", [False, True])
def test_copies_are_fetched_for_each_way_and_gradients_go_back(frozen: bool) -> None:
    net = nn.Sequential(nn.Conv2d(3, 5, 3, bias=False), nn.ReLU(), nn.Conv2d(5, 7, 3, bias=False))
    net.bfloat16()[2].requires_grad_(not frozen)
    rates = RATES["cpu"]
    with recorded(net, (1, 3, 22, 12), torch.bfloat16) as (network, _):
        places = list(captured(network))
        sizes = [network.nodes[place].outputs[0].bytes for place in places]
        assert sizes == [2 * 3 * 5 * 9, 2 * 5 * 7 * 9]
        first, second = places
        end = len(network.order)
        last = next(i for i, n in enumerate(network.order) if n.outputs[0].shape[1:2] == (7,))
        copies = Copies(network, Streamed(on_host=(first,), on_disk=(second,)), rates)
        ahead = Copies(network, Streamed(on_host=(first,), on_disk=(second,)), rates, ahead=True)
        assert copies.copied(0, end) == sum(sizes) and copies.copied(last, end) == sizes[1]
        there = sizes[1] / rates.disk
        back = there if frozen else 2 * there
        assert copies.transfers(last, end) == pytest.approx((there, back))
        assert copies.waiting(last, end, 1.0, 1.0) == pytest.approx(there + back)
        assert copies.waiting(last, end, 1.0, None) == pytest.approx(there)
        assert ahead.waiting(last, end, 1.0, 1.0) == 0
        assert ahead.waiting(last, end, there / 2, back / 4) == pytest.approx(there / 2 + back * 3 / 4)
        gradient = 0 if frozen else 2 * sizes[1]  # added up in float32
        assert copies.flight(last, end) == sizes[1] + gradient
        assert ahead.flight(last, end) == 2 * sizes[1] + gradient
        assert copies.flight_of_kept(0, end) == max(2 * sizes[0], sizes[1] if frozen else 2 * sizes[1])
        assert copies.traffic([(last, end)]) == sizes[1] * (2 if frozen else 3)
        nothing = Copies(network, Streamed(), rates)
        assert nothing.flight(0, end) == nothing.copied(0, end) == nothing.flight_of_kept(0, end) == 0
        assert nothing.waiting(0, end, 0.0, 0.0) == 0


def test_rates_are_known_by_kind_and_card() -> None:
    assert rates_of("cpu") == rates_of("cpu:0") == RATES["cpu"]
    assert rates_of("cuda:0") == RATES["cuda"] and rates_of("cuda:rtx2080ti") == RATES["cuda:rtx2080ti"]
    with pytest.raises(ValueError, match="cuda:none"):
        rates_of("cuda:none")


def test_an_optimizer_keeps_something_for_what_it_trains() -> None:
    trained, frozen = torch.zeros(5, requires_grad=True), torch.zeros(7)
    derived = trained * 2
    assert state_for("AdamW", [trained, frozen, derived]) == {id(trained): 2 * 5 * 4}
    assert state_for("sgd", [trained]) == {id(trained): 0}
    assert state_for("adam", [frozen]) == {}
    with pytest.raises(ValueError, match="none of PyTorch's"):
        state_for("nadam2", [trained])


# What is kept for later processes


def test_the_cache_makes_its_folder_and_refuses_what_it_never_wrote(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file.json"
    cache.write(path, ["hello"])
    cache.write(path, {"Größe": 1})
    assert cache.read(path) == {"Größe": 1} and list(path.parent.iterdir()) == [path]
    path.write_text('{"Größe": 2}')
    with pytest.raises(ValueError, match="not what was written"):
        cache.read(path)


def test_a_processor_is_known_by_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = tmp_path / "cpuinfo"
    about.write_text("processor : 0\nmodel name\t: Some CPU @ 2 GHz\nmodel name\t: another\n")
    monkeypatch.setattr(calibrate, "CPUINFO", about)
    assert calibrate.name_of(torch.device("cpu")) == "cpu, Some CPU @ 2 GHz"
    about.write_text("processor : 0\n")
    assert calibrate.name_of(torch.device("cpu")).startswith("cpu, ")
    assert "Some" not in calibrate.name_of(torch.device("cpu"))


# What is known of background


@given(st.data())
def test_a_box_of_equal_cells_is_known_to_be_constant(data: st.DataObject) -> None:
    known = Constants((13, 9), max_on_axis=data.draw(st.integers(2, 9)))
    values = data.draw(st.lists(st.sampled_from([VARIED, 1, 1, 1, 2]), min_size=known.cells.size,
                                max_size=known.cells.size))  # fmt: skip
    known.cells[:] = np.reshape(values, known.cells.shape)
    known.keys = [b"one", b"two"]
    rows = sorted(data.draw(st.lists(st.integers(0, 13), min_size=2, max_size=2, unique=True)))
    columns = sorted(data.draw(st.lists(st.integers(0, 9), min_size=2, max_size=2, unique=True)))
    box = Box((rows[0], columns[0]), (rows[1], columns[1]))
    background = Background.__new__(Background)
    background.known = known
    ends = [(np.array([float(lo)]), np.array([float(hi)])) for lo, hi in box.intervals()]
    found = background.constant([lo for lo, _ in ends], [hi for _, hi in ends])
    assert bool(found[0, 0]) == (known.key_of_box(box) is not None)


@given(st.data())
def test_sums_over_boxes(data: st.DataObject) -> None:
    marks = np.array(data.draw(st.lists(st.booleans(), min_size=24, max_size=24))).reshape(4, 6)
    lo = [data.draw(st.integers(0, n)) for n in marks.shape]
    hi = [data.draw(st.integers(0, n)) for n in marks.shape]
    found = sums(summed(marks), [(np.array([a]), np.array([b])) for a, b in zip(lo, hi, strict=True)])
    assert found.item() == marks[lo[0] : hi[0], lo[1] : hi[1]].sum()


@pytest.mark.parametrize(
    ("layer", "scale", "before", "after"),
    [
        (nn.Conv2d(3, 2, 5, padding=2), 1, 2, 2),
        (nn.Conv2d(3, 2, 3, stride=2, padding=1), 2, 1, 0),
        (nn.Conv2d(3, 2, 3, dilation=4), 1, 0, 8),
    ],
    ids=["five", "strided", "dilated"],
)
def test_what_a_window_sees(layer: nn.Conv2d, scale: int, before: int, after: int) -> None:
    with recorded(layer, (1, 3, 64, 48), torch.float32) as (network, _):
        node = next(n for n in network.order if type(n.op).__name__ == "Convolution")
        (sides,) = reaches_of_position(node.op, node.outputs[0].space.extent, node.maps)  # type: ignore[arg-type]
    assert sides is not None
    assert [(s.scale, s.before, s.after) for s in sides] == [(scale, before, after)] * 2


@pytest.mark.parametrize("chains", ["never", "always"])
def test_a_search_is_let_go_when_it_is_over(chains: str) -> None:
    """Without waiting for Python's collector of cycles."""
    net = nn.Sequential(*[nn.Conv2d(8 if i else 3, 8, 3, padding=1) for i in range(6)])
    with recorded(net, (1, 3, 64, 64), torch.float32, chains=chains) as (network, _):
        choose_plan(network, rates_of("cpu"), 1 << 30, lower_tiers(None, Options()))  # what is imported is cyclic
        gc.collect()
        gc.disable()
        try:
            chooser = Chooser(network, rates_of("cpu"), lower_tiers(None, Options()))
            chooser.choose(900 << 10)
            alive = [weakref.ref(chooser.search), weakref.ref(chooser.search.intervals)]
            del chooser
            assert [ref() for ref in alive] == [None, None]
        finally:
            gc.enable()
