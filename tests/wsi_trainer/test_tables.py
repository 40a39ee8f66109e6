"""Tables of people: any usual encoding is read, and what is odd is said with its line."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wsi_trainer.cli import main
from wsi_trainer.data.manifest import read_manifest
from wsi_trainer.errors import UserError
from wsi_trainer.io.tables import _tell, escape_formula, micrometres, read_table, table_bytes, unescape_formula
from wsi_trainer.preprocess.inputs import list_slides

TEXT = "slide,label\nMüller.svs,grün\n"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1", "cp1252", "utf-16", "utf-16-le", "utf-16-be"])
def test_the_encodings_of_spreadsheets_are_read(
    tmp_path: Path, encoding: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "m.csv"
    mark = {"utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff"}.get(encoding, b"")
    path.write_bytes(mark + TEXT.encode(encoding))
    _tell.cache_clear()
    with caplog.at_level(logging.WARNING):
        table = read_table(path)
    assert [row for _, row in table.rows] == [{"slide": "Müller.svs", "label": "grün"}]
    told = {"latin-1": "Windows-1252", "cp1252": "Windows-1252"}.get(encoding, "utf-16" if "16" in encoding else "")
    assert (told in caplog.text) if told else not caplog.text
    assert [item.job.name for item in list_slides(str(path))] == ["Müller"]
    assert [record.slide for record in read_manifest(path)] == ["Müller.svs"]


ODD = [
    (b"slide,label\na.svs,1\nb.svs\n", "line 3: it has 1 cells, and the first line 2"),
    (b"slide,label\na.svs,1,extra,more\n", "line 2: it has 4 cells, and the first line 2"),
    (b"slide,label,slide\na.svs,1,b.svs\n", "has the column 'slide' 2 times"),
    (b'slide,label\n"a.svs,1\nb.svs,0\n', 'a quote (") is opened and never closed'),
    (b'slide,label\n"a.svs,1\nb.svs,"0"\n', "text after a closing quote"),
    (b"slide,label\n" + b"x" * 200_000 + b",1\n", "line 2: a cell has more than 131072 characters"),
    (b"slide;label\na.svs;1\n", "separated by semicolons: save it with commas"),
    (b"slide;mpp\na.svs;0,5\n", "separated by semicolons: save it with commas"),
    (b"slide\tlabel\na.svs\t1\n", "separated by tabs: save it with commas"),
    (b"Slide,label\na.svs,1\n", "write 'slide' instead of 'Slide'"),
    (b"s\0l\0i\0d\0e\0\n\0", "NUL bytes"),
    (b"\xff\xfes", "begins as UTF-16 and goes on as something else"),
    (b"label\n1\n", "has no column 'slide'; its columns are label"),
    (b"", "its columns are none"),
    (b"slide,label\n,1\n", "line 2: the column 'slide' is empty"),
]


@pytest.mark.parametrize(("data", "message"), ODD)
def test_what_is_odd_is_one_line_in_every_command(
    tmp_path: Path, data: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.csv"
    path.write_bytes(data)
    run = [f"--out={tmp_path / 'run'}", f"--data.manifest={path}"]
    for words in (["preprocess", str(path), str(tmp_path / "out")], ["fit", *run]):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1 and "Traceback" not in error


def test_padding_and_empty_lines_of_spreadsheets_are_no_oddity(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_text("slide,label,\n\na.svs,1,\n,,\nb.svs,0,,\n")
    assert [line for line, _ in read_table(path).rows] == [3, 5]


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "0", "1e400", "0,5", "0.5um", "1000"])
def test_a_pixel_has_a_size(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="expected micrometres per pixel"):
        micrometres(text, "here")
    (tmp_path / "m.csv").write_text(f'slide,label,mpp\na.svs,1,"{text}"\n')
    (tmp_path / "a.svs").write_bytes(b"")
    assert main(["preprocess", str(tmp_path / "m.csv"), str(tmp_path / "out")]) == 2
    assert main(["fit", f"--out={tmp_path / 'run'}", f"--data.manifest={tmp_path / 'm.csv'}"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "expected micrometres per pixel" in first and "expected micrometres per pixel" in second


@given(
    st.lists(
        st.tuples(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), st.text("ab,\"\n='"))
    )
)
def test_what_is_written_is_read_again(tmp_path_factory: pytest.TempPathFactory, cells: list[tuple[str, str]]) -> None:
    rows = [{"slide": f"s{a}", "label": b} for a, b in cells]
    path = tmp_path_factory.getbasetemp() / "again.csv"
    path.write_bytes(table_bytes(["slide", "label"], rows))
    assert [row for _, row in read_table(path).rows] == rows


@pytest.mark.parametrize("name", ["=cmd|' /C calc'!A0", "@SUM(1)", "+1", "-dash", "plain", "'quoted", "\tx"])
def test_a_formula_is_text_to_a_spreadsheet_and_can_be_read_again(name: str) -> None:
    shown = str(escape_formula(name))
    assert not shown.startswith(("=", "+", "-", "@", "\t"))
    assert unescape_formula(shown) == name


def test_the_same_base_name_in_two_folders(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_text("slide,label\nx/1/s.svs,1\nx/2/s.svs,0\nx/2/t.svs,0\n")
    assert [item.job.name for item in list_slides(str(path))] == ["1/s", "2/s", "t"]


def test_a_slide_that_is_there_twice(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_text("slide\nx/s.svs\n./x/s.svs\n")
    with pytest.raises(UserError, match=r"line 3: slide \./x/s\.svs is in line 2 already"):
        list_slides(str(path))


def test_slides_of_a_table_that_are_missing_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.csv"
    path.write_text("slide,label\n" + "".join(f"s{number}.svs,1\n" for number in range(43)))
    assert main(["preprocess", str(path), str(tmp_path / "out")]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "43 failed" in shown and "and 3 more" in shown
    assert {row["reason"] for _, row in read_table(tmp_path / "out" / "failures.csv").rows} == {"does not exist"}
