"""Plans as JSON, of this version and former ones: nothing is lost, plans are told apart by what they decide alone,
and a text that is no plan is refused with the key at fault."""

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
from lightning_plugin.plan import HALOS, TIERS, Forecast, SegmentForecast, SegmentPlan
from lightning_plugin.plan_fields import ChainPlan
from lightning_plugin.plan_forecast import ChainForecast
from tests.lightning_plugin.former_plans import FIGURES, SEGMENT_FIGURES, version_1

#: Plans that the last engine without versions has written.
FORMER = sorted((Path(__file__).parent / "version_1").glob("*.json"))
QUIET = settings(max_examples=60, deadline=None, database=None)

counts = st.integers(0, 2**50)
numbers = st.floats(0, allow_nan=False)
words = st.text(max_size=8)
places = st.lists(st.integers(0, 999), max_size=4).map(tuple)
figures = st.builds(SegmentForecast, counts, counts, counts, counts, counts, numbers, numbers, counts)
forecasts = st.builds(Forecast, counts, counts, counts, numbers, numbers, counts, counts, counts, counts, counts)
#: Figures that version 1 does not know.
LATER, LATER_OF_SEGMENTS = ("streamed_bytes", "traffic_bytes"), ("copied_bytes",)


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
    data = json.loads(text)
    figures, segment_figures = {*FIGURES, *LATER}, {*SEGMENT_FIGURES, *LATER_OF_SEGMENTS}
    assert data["version"] == 7 and set(data["forecast"]) == figures and not figures & set(data)
    for segment in data["segments"]:
        assert set(segment["forecast"]) == segment_figures and not segment_figures & set(segment)


@QUIET
@given(plan=plans)
def test_any_plan_of_version_1_is_read_with_its_figures(plan: Plan) -> None:
    # What it could not say:
    segments = tuple(
        replace(s, pieces=1, alike=False, recall=False, forecast=replace(s.forecast, copied_bytes=0))
        for s in plan.segments
    )
    forecast = replace(plan.forecast, streamed_bytes=0, traffic_bytes=0)
    plan = replace(plan, segments=segments, approximation="", forecast=forecast)
    plan = replace(plan, on_host=(), on_disk=(), fetched_ahead=False, chains=())
    assert everything(Plan.from_json(version_1(plan))) == everything(plan)


@pytest.mark.parametrize("path", FORMER, ids=lambda path: path.stem)
def test_what_the_former_engine_wrote_is_read(path: Path) -> None:
    assert len(FORMER) == 2
    text = path.read_text()
    plan, data = Plan.from_json(text), json.loads(text)
    assert json.loads(version_1(plan)) == data
    assert plan.peak_bytes == data["peak_bytes"] > 0 and plan.seconds == data["seconds"] > 0
    assert plan.plain_bytes == data["plain_bytes"] > 0 and plan.recompute == data["recompute"]
    assert everything(Plan.from_json(plan.to_json())) == everything(plan)


@QUIET
@given(plan=plans, other=forecasts, of_segment=figures, path=words)
def test_figures_and_names_do_not_make_another_plan(
    plan: Plan, other: Forecast, of_segment: SegmentForecast, path: str
) -> None:
    said = tuple(replace(s, forecast=of_segment, path=path) for s in plan.segments)
    twin = replace(plan, segments=said, forecast=other)
    assert twin == plan and hash(twin) == hash(plan)
    assert twin.forecasts == (other, (of_segment,) * len(said))


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


def changed(version: int, change: Callable[[dict[str, Any]], Any]) -> str:
    grid = Grid((2, 2))
    plan = Plan((SegmentPlan((1,), grid, grid),), shape=(1, 3, 8, 8))
    data = json.loads(plan.to_json() if version != 1 else version_1(plan))
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("version", "change", "says"),
    [
        (7, lambda d: d.update(version=8), "version 8, and this lightning_plugin reads versions up to 7: update"),
        (4, lambda d: d.update(version=0), "its version is 0, and there are 1 and 2 and 3 and 4 and 5"),
        (4, lambda d: d.update(version="2"), 'its version is "2"'),
        (4, lambda d: d.update(version=True), "its version is true"),
        (4, lambda d: d.update(peak_byte=1), "the plan has an unknown key 'peak_byte'; its keys are segments"),
        (4, lambda d: d.update(peak_bytes=1), "the plan has an unknown key 'peak_bytes'"),
        (4, lambda d: d["forecast"].update(secs=1), "'forecast' of the plan has an unknown key 'secs'"),
        (4, lambda d: d["segments"][0].update(seconds=1.0), "segment 0 has an unknown key 'seconds'"),
        (4, lambda d: d["segments"][0]["forecast"].update(drop=1), "'forecast' of segment 0 has an unknown key 'drop'"),
        (4, lambda d: d["segments"][0]["forward"].update(side=[3]), "'forward' of segment 0 has an unknown key 'side'"),
        (4, lambda d: d["segments"][0].pop("targets"), "segment 0 has no 'targets'"),
        (4, lambda d: d["segments"][0].update(keep="no"), "'keep' of segment 0 is true or false, not \"no\""),
        (4, lambda d: d["segments"][0].update(targets=7), "'targets' of segment 0 is a list of whole numbers, not 7"),
        (4, lambda d: d["segments"][0].update(drop=1.5), "'drop' of segment 0 is a whole number, not 1.5"),
        (4, lambda d: d.update(segments=3), "'segments' of the plan is a list of segments, not 3"),
        (4, lambda d: d.update(segments=[3]), "segment 0 is 3, and should be an object"),
        (4, lambda d: d.update(forecast=None), "'forecast' of the plan is null, and should be an object"),
        (4, lambda d: d.pop("version"), "has a 'forecast', which is of version 2.*does not say \"version\": 2"),
        (1, lambda d: d.update(peak_byte=1), "the plan has an unknown key 'peak_byte'"),
        (1, lambda d: d["segments"][0].update(colour="red"), "segment 0 has an unknown key 'colour'"),
        (1, lambda d: d.update(version=2), "the plan has an unknown key 'peak_bytes'"),
        (1, lambda d: d.update(peak_bytes="many"), "'peak_bytes' of 'forecast' of the plan is a whole number"),
    ],
)
def test_what_is_wrong_is_named(version: int, change: Callable[[dict[str, Any]], Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Plan.from_json(changed(version, change))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '"plan"', "{}"])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="this is not a plan"):
        Plan.from_json(text)


def test_what_is_said_twice_is_refused() -> None:
    text = changed(7, lambda d: None).replace('"shape":', '"budget":', 1)
    with pytest.raises(PlanError, match='it says "budget" twice in one object'):
        Plan.from_json(text)


def test_a_version_may_be_said_of_the_former_form_too() -> None:
    text = changed(1, lambda d: d.update(version=1, peak_bytes=5))
    assert Plan.from_json(text).peak_bytes == 5
