"""Plans as JSON: nothing is lost, the format stays, plans are told apart by what they decide alone, and a text that
is no plan is refused with the key at fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_plugin import Grid, Plan
from lightning_plugin.errors import PlanError
from lightning_plugin.plan import HALOS, TIERS, ChainForecast, ChainPlan, Forecast, SegmentForecast, SegmentPlan

#: A plan in today's format. A change of this file is another version of the format.
WRITTEN = Path(__file__).parent / "plan.json"
QUIET = settings(database=None)

counts = st.integers(0, 2**50)
numbers = st.floats(0, allow_nan=False)
words = st.text(max_size=8)
places = st.lists(st.integers(0, 999), max_size=4).map(tuple)
figures = st.builds(SegmentForecast, counts, counts, counts, counts, counts, numbers, numbers, counts)
forecasts = st.builds(
    Forecast, counts, counts, counts, numbers, numbers, counts, counts, counts, counts, counts, counts
)


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    sizes = st.lists(st.integers(1, 99), min_size=1, max_size=3).map(tuple)
    cut = draw(sizes)
    return Grid(cut, draw(st.tuples(*(st.integers(1, 99) for _ in cut))) if draw(st.booleans()) else ())


@st.composite
def segments(draw: st.DrawFn) -> SegmentPlan:
    """Any segment that may be: kept or not, on any tier, scanned, ahead, dropped."""
    forward, keep, tier, halo = (
        draw(s) for s in (grids(), st.booleans(), st.sampled_from(TIERS), st.sampled_from(HALOS))
    )
    tiled = not keep and halo == "recompute"
    half, drop = draw(st.booleans()), draw(st.integers(0, 3)) if tiled and tier == "device" else 0
    return SegmentPlan(
        targets=draw(places),
        forward=forward,
        backward=forward if halo == "share" else draw(grids()),
        keep=keep,
        tier=tier,
        halo=halo,
        half=half,
        ahead=not keep and draw(st.booleans()),
        drop=drop,
        pieces=draw(st.integers(1, 5)) if tiled else 1,
        alike=tiled and draw(st.booleans()),
        recall=tiled and not half and not drop and draw(st.booleans()),
        path=draw(words),
        forecast=draw(figures),
    )


chain_figures = st.builds(ChainForecast, counts, counts, counts, counts, numbers, counts)


@st.composite
def chains(draw: st.DrawFn) -> ChainPlan:
    count = draw(st.integers(1, 10**6))
    kept = draw(st.integers(0, count))
    of = draw(st.lists(segments(), max_size=2).map(tuple))
    return ChainPlan(
        draw(st.integers(0, 999)), count, draw(st.integers(0, 99)), kept, of, draw(words), draw(chain_figures)
    )


plans = st.builds(
    Plan,
    st.lists(segments(), max_size=4).map(tuple),
    st.none() | counts,
    places,
    st.lists(words, max_size=2).map(tuple),
    words,
    forecasts,
    on_host=places,
    on_disk=places,
    fetched_ahead=st.booleans(),
    chains=st.lists(chains(), max_size=2).map(tuple),
)


def everything(plan: Plan) -> Any:
    """All fields, those that are not compared too."""
    inside = [s for c in plan.chains for s in c.segments]
    named = [(part.path, part.forecast) for part in (*plan.segments, *plan.chains, *inside)]
    return plan, plan.forecast, named


@QUIET
@given(plan=plans)
def test_any_plan_goes_through_json_unchanged(plan: Plan) -> None:
    text = plan.to_json()
    again = Plan.from_json(text)
    assert everything(again) == everything(plan) and again.to_json() == text


def test_the_format_stays() -> None:
    grid = Grid((2, 2))
    tiled = SegmentPlan((3,), grid, Grid((4, 4), (8, 8)), tier="host", ahead=True, path="stem")
    plan = Plan(
        (tiled, SegmentPlan((9,), Grid((1, 1)), Grid((1, 1)), keep=True, forecast=SegmentForecast(5, 6, 7, 8))),
        budget=2**20,
        shape=(1, 3, 64, 64),
        barriers=("aten.fft_fft2",),
        forecast=Forecast(peak_bytes=7, plain_bytes=20, seconds=0.5),
        on_disk=(1, 2),
        chains=(ChainPlan(12, 30, 4, 2, (tiled,), forecast=ChainForecast(1, 2, 3, 4, 5.0, 6)),),
    )
    assert plan.to_json() + "\n" == WRITTEN.read_text()
    assert everything(Plan.from_json(WRITTEN.read_text())) == everything(plan)


@QUIET
@given(plan=plans, other=forecasts, of_segment=figures, path=words)
def test_figures_and_names_do_not_make_another_plan(
    plan: Plan, other: Forecast, of_segment: SegmentForecast, path: str
) -> None:
    said = tuple(replace(s, forecast=of_segment, path=path) for s in plan.segments)
    twin = replace(plan, segments=said, forecast=other)
    assert twin == plan and hash(twin) == hash(plan)
    assert twin.forecast == other and all(s.forecast == of_segment for s in twin.segments)


#: For each decision of a segment, another one that may be.
OTHERS: dict[str, Callable[[SegmentPlan], Any]] = {
    "targets": lambda s: (*s.targets, 7),
    "forward": lambda s: Grid((s.forward.counts[0] + 1, *s.forward.counts[1:]), s.forward.sides),
    "backward": lambda s: Grid((s.backward.counts[0] + 1, *s.backward.counts[1:]), s.backward.sides),
    "keep": lambda s: not s.keep,
    "tier": lambda s: "disk" if s.tier != "disk" else "host",
    "halo": lambda s: "recompute",
    "half": lambda s: not s.half,
    "ahead": lambda s: not s.ahead,
    "drop": lambda s: s.drop + 1,
    "pieces": lambda s: s.pieces + 1,
    "alike": lambda s: not s.alike,
    "recall": lambda s: not s.recall,
}


@pytest.mark.parametrize("name", OTHERS)
def test_each_decision_makes_another_plan(name: str) -> None:
    grid = Grid((2, 2))
    one = SegmentPlan((1,), grid, grid, halo="share" if name == "halo" else "recompute")
    other = replace(one, **{name: OTHERS[name](one)})
    assert one != other and Plan((one,)) != Plan((other,))


def test_all_fields_are_decisions_names_or_forecasts() -> None:
    assert {f.name for f in fields(SegmentPlan)} == {*OTHERS, "path", "forecast"}
    assert Plan((), budget=1) != Plan((), budget=2) and Plan((), shape=(1, 3)) != Plan((), shape=(1, 1))


def test_figures_are_read_and_not_written() -> None:
    plan = Plan((), forecast=Forecast(1, 2, 3, 4.0, 5.0))
    assert (plan.peak_bytes, plan.plain_bytes, plan.seconds, plan.recompute) == (1, 2, 4.0, 5.0)
    for name in ("peak_bytes", "plain_bytes", "seconds", "recompute"):
        with pytest.raises((AttributeError, FrozenInstanceError)):
            setattr(plan, name, 0)


def changed(change: Callable[[dict[str, Any]], Any]) -> str:
    grid = Grid((2, 2))
    data = json.loads(Plan((SegmentPlan((1,), grid, grid),), shape=(1, 3, 8, 8)).to_json())
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(version=2), "its version is 2, and this lightning_plugin reads version 1: make the plan"),
        (lambda d: d.update(version=0), "its version is 0"),
        (lambda d: d.update(version="2"), 'its version is "2"'),
        (lambda d: d.update(version=True), "its version is true"),
        (lambda d: d.update(peak_byte=1), "the plan has an unknown key 'peak_byte'; its keys are segments"),
        (lambda d: d.update(peak_bytes=1), "the plan has an unknown key 'peak_bytes'"),
        (lambda d: d["forecast"].update(secs=1), "'forecast' of the plan has an unknown key 'secs'"),
        (lambda d: d["segments"][0].update(seconds=1.0), "segment 0 has an unknown key 'seconds'"),
        (lambda d: d["segments"][0]["forecast"].update(drop=1), "'forecast' of segment 0 has an unknown key 'drop'"),
        (lambda d: d["segments"][0]["forward"].update(side=[3]), "'forward' of segment 0 has an unknown key 'side'"),
        (lambda d: d["segments"][0].pop("targets"), "segment 0 has no 'targets'"),
        (lambda d: d["segments"][0].update(keep="no"), "'keep' of segment 0 is true or false, not \"no\""),
        (lambda d: d["segments"][0].update(targets=7), "'targets' of segment 0 is a list of whole numbers, not 7"),
        (lambda d: d["segments"][0].update(drop=1.5), "'drop' of segment 0 is a whole number, not 1.5"),
        (lambda d: d.update(segments=3), "'segments' of the plan is a list of segments, not 3"),
        (lambda d: d.update(segments=[3]), "segment 0 is 3, and should be an object"),
        (lambda d: d.update(forecast=None), "'forecast' of the plan is null, and should be an object"),
        (lambda d: d.pop("version"), "its version is null"),
    ],
)
def test_what_is_wrong_is_named(change: Callable[[dict[str, Any]], Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Plan.from_json(changed(change))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '"plan"', "{}"])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="this is not a plan"):
        Plan.from_json(text)


def test_what_is_said_twice_is_refused() -> None:
    text = changed(lambda d: None).replace('"shape":', '"budget":', 1)
    with pytest.raises(PlanError, match='it says "budget" twice in one object'):
        Plan.from_json(text)
