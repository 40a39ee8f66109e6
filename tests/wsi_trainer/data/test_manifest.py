"""Reading the manifest: what is accepted, and the message for each thing that is not."""

from pathlib import Path

import pytest

from wsi_trainer.data.manifest import check_files, read_manifest, write_manifest
from wsi_trainer.errors import UserError


def written(folder: Path, text: str) -> Path:
    path = folder / "manifest.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_fills_in_what_is_optional(tmp_path: Path) -> None:
    (record,) = read_manifest(written(tmp_path, "slide,label\nsub/a.svs, tumour \n"))
    assert record.slide == "sub/a.svs" and record.label == "tumour"
    assert record.path == tmp_path / "sub" / "a.svs"
    assert record.patient == "a.svs" and record.split == "" and record.site == ""


def test_reads_files_that_spreadsheets_write(tmp_path: Path) -> None:
    path = tmp_path / "manifest.csv"
    path.write_bytes(b"\xef\xbb\xbfslide,label,patient\r\na.svs,1,p\r\n")
    assert read_manifest(path)[0].patient == "p"


def test_empty_cells_as_other_programs_write_them_name_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = "".join(
        f"s{number}.svs,NA,{cell},{cell}\n" for number, cell in enumerate(("nan", "NA", "", "None", "Nan Li"))
    )
    manifest = written(tmp_path, f"slide,label,patient,site\n{rows}")
    records = read_manifest(manifest)
    assert [record.patient for record in records] == ["s0.svs", "s1.svs", "s2.svs", "s3.svs", "Nan Li"]
    assert [record.site for record in records] == ["", "", "", "", "Nan Li"]
    assert {record.label for record in records} == {"NA"}, "a class may be called so"
    assert len(caplog.messages) == 1 and f"{manifest} has 3 cells such as nan or NA" in caplog.messages[0]


def test_paths_start_at_the_root_or_at_the_column_path(tmp_path: Path) -> None:
    manifest = written(tmp_path, "slide,path,label\na,store/a.zarr,0\nb,,1\n")
    first, second = read_manifest(manifest, root=Path("/slides"))
    assert first.path == Path("/slides/store/a.zarr") and second.path == Path("/slides/b")


def test_what_is_written_reads_back_the_same_from_elsewhere(tmp_path: Path) -> None:
    text = "slide,label,patient,split,site\na.svs,0,p,train,A\nb.svs,1,q,test,B\n"
    records = read_manifest(written(tmp_path, text))
    copy = tmp_path / "elsewhere" / "splits.csv"
    write_manifest(copy, records)
    assert read_manifest(copy) == records


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,label\na,1\n", "no column 'slide'; its columns are name, label"),
        ("slide\na\n", "no column 'label'"),
        ("", "its columns are none"),
        ("slide,label\n", "lists no slides"),
        ("slide,label\na,1\nb,\n", "line 3: the column 'label' is empty"),
        (
            "slide,label,split\na,1,training\n",
            "line 2: split is 'training'; it must be one of train, val, test",
        ),
        ("slide,label\na,1\na,0\n", "lists slide a 2 times"),
    ],
)
def test_names_the_line_and_the_way_out(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        read_manifest(written(tmp_path, text))
    assert message in str(raised.value) and str(tmp_path / "manifest.csv") in str(raised.value)


def test_an_absent_manifest_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no manifest at .*absent\.csv"):
        read_manifest(tmp_path / "absent.csv")


def test_slides_to_predict_need_no_label(tmp_path: Path) -> None:
    assert read_manifest(written(tmp_path, "slide\na\n"), labelled=False)[0].label == ""


def test_missing_slides_are_named(tmp_path: Path) -> None:
    records = read_manifest(written(tmp_path, "slide,label\nhere.svs,0\ngone.svs,2\n"))
    (tmp_path / "here.svs").touch()
    with pytest.raises(UserError, match=r"1 of 2 slides are missing, the first is .*gone\.svs"):
        check_files(records)
