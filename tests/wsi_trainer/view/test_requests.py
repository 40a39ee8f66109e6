"""Requests that nobody should make: a refusal and nothing else, and no file but those of the run."""

from __future__ import annotations

import json
import re
import string
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wsi_trainer.view.conftest import STRIDE, Made, Served, make_run, serving
from wsi_trainer.cli import main
from wsi_trainer.errors import UserError
from wsi_trainer.view.contents import contents_of
from wsi_trainer.view.scene import Scene
from wsi_trainer.view.server import ROUTES

REFUSALS = {400, 403, 404}
SECRET = b"what nobody may read"
WORDS = st.one_of(
    st.integers(-(10**12), 10**12).map(str),
    st.sampled_from(
        ["..", "%2e%2e", "%2e%2e%2f%2e%2e%2fsecret.txt", "..%5c", "%00", "tissue", "0", "1", "-0", "1e9", "nan", "inf",
         "0x1", "%C2%B2", "1_0", "+1", "%D9%A1", "secret.txt", "9" * 400, "%", "%zz", "0.0", "{slide}", "~", "*"]
    ),
    st.text(string.ascii_letters + string.digits + "-._~!$'()*,;:@%", min_size=1, max_size=30),
)  # fmt: skip
ADDRESS = st.one_of(
    st.sampled_from(list(ROUTES)),
    st.lists(WORDS, max_size=6).map(lambda words: "/" + "/".join(words)),
)
NAMES = ("slide", "layer", "level", "row", "column", "name")


@given(address=ADDRESS, words=st.tuples(*[WORDS] * len(NAMES)), query=st.lists(st.tuples(WORDS, WORDS), max_size=3))
def test_bad_requests_are_refused(
    served: Served, address: str, words: tuple[str, ...], query: list[tuple[str, str]]
) -> None:
    for name, word in zip(NAMES, words):
        address = address.replace("{" + name + "}", word)
    target = address + ("?" + "&".join(f"{key}={value}" for key, value in query) if query else "")
    reply = served.get(target)
    assert SECRET not in reply.body
    if "token=" not in target and reply.status != 200:
        assert reply.status in REFUSALS, (target, reply)
        assert "error" in json.loads(reply.body) if reply.body.startswith(b"{") else reply.status == 400


@given(
    asked=st.sampled_from(["region.png", "layers/0/at.json", "layers/0/outlines.json", "layers/0/top.json"]),
    numbers=st.fixed_dictionaries(dict.fromkeys(("x", "y", "width", "height", "threshold", "count"), WORDS)),
)
def test_bad_numbers_are_refused(served: Served, asked: str, numbers: dict[str, str]) -> None:
    query = "&".join(f"{name}={value}" for name, value in numbers.items())
    reply = served.get(f"/slides/0/{asked}?{query}")
    assert reply.status == 200 or (reply.status in REFUSALS and "error" in json.loads(reply.body)), (query, reply)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH"])
def test_only_reading_is_answered(served: Served, method: str) -> None:
    assert served.get("/contents.json", method=method).status in REFUSALS


@pytest.mark.parametrize("stride", ["1e999", "NaN", "0", "-8", "1" + "0" * 400, '"wide"', "[]"])
def test_a_stride_that_cannot_be_is_refused_by_name(tmp_path: Path, stride: str) -> None:
    made = make_run(tmp_path / "run", tmp_path / "slides")
    about = made.folder.maps("activation") / "heatmaps.json"
    about.write_text(about.read_text().replace(f'"stride": {STRIDE}', f'"stride": {stride}', 1))
    with pytest.raises(UserError, match=rf"{re.escape(str(about))} is damaged") as caught:
        contents_of(made.folder.path)
    assert "\n" not in str(caught.value)


def test_a_map_outside_of_the_run_is_refused(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run", tmp_path / "slides")
    np.save(tmp_path / "outside.npy", np.ones((4, 4), np.float32))
    about = made.folder.maps("activation") / "heatmaps.json"
    facts = json.loads(about.read_text())
    for path in ("../../../outside.npy", str(tmp_path / "outside.npy")):
        next(iter(facts["slides"].values()))["array"] = path
        about.write_text(json.dumps(facts))
        with pytest.raises(UserError, match="outside of the run"):
            contents_of(made.folder.path)
    link = made.folder.maps("activation") / "link.npy"
    link.symlink_to(tmp_path / "outside.npy")
    next(iter(facts["slides"].values()))["array"] = link.name
    about.write_text(json.dumps(facts))
    with pytest.raises(UserError, match="outside of the run"):
        contents_of(made.folder.path)


def test_a_damaged_map_or_slide_leaves_the_others(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run", tmp_path / "slides")
    (made.folder.maps("activation") / "map 0.npy").write_bytes(b"\x93NUMPY no more")
    np.save(made.folder.maps("activation") / "map 1.npy", np.array([[{"an": "object"}]]), allow_pickle=True)
    (tmp_path / "slides" / "slide 2 <&>.tif").write_bytes(b"II*\0 and then nothing")
    with serving(Scene(made.contents())) as served:
        numbers = {one["name"][6]: one["number"] for one in json.loads(served.get("/contents.json").body)["slides"]}
        for slide in "01":
            about = served.get(f"/slides/{numbers[slide]}/about.json")
            assert about.status == 200 and "damaged" in json.loads(about.body)["layers"][0]["broken"]
            assert served.get(f"/slides/{numbers[slide]}/layers/0/0/0-0.bin").status == 404
        assert served.get(f"/slides/{numbers['2']}/about.json").status == 404
        assert served.get(f"/slides/{numbers['2']}/tiles/0/0-0.jpg").status == 404
        assert served.get(f"/slides/{numbers['3']}/tiles/0/0-0.jpg").status == 200


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing-there"], "there is nothing at"),
        (["{run}", "--port=70000"], "--port is 70000"),
        (["{run}", "--host=no.such.host.invalid"], "--host is"),
        (["{run}", "--compare={slides}"], "is not the folder of a run"),
        (["{slides}", "--compare={run}"], "--compare is about runs"),
        (["{run}", "--regions=nowhere"], "--regions: there is no folder"),
        (["{run}", "--to-8bit=9"], "expected LOW:HIGH"),
        (["{run}", "--static={run}"], "is not empty"),
        (["{run}", "--static=new", "--only=[nobody]"], "--only names 'nobody'"),
        (["{run}", "--static=new", "--longest=5"], "--longest is 5"),
    ],
)
def test_a_wrong_command_is_told_in_one_line(
    made: Made, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    places = {"run": made.folder.path, "slides": made.folder.path.parent / "slides"}
    assert main(["view", *(word.format(**places) for word in words)]) == 2
    shown = capsys.readouterr().err
    assert said in shown and shown.count("\n") == 1
