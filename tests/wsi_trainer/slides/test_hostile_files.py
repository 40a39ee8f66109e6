"""Files that ask for more than there is, or are not what they say: one line with the true reason, soon."""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import tifffile
import zarr
from PIL import Image

from tests.wsi_trainer.slides.dicom_files import write_slide
from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.io.arrays import open_zarr_array
from wsi_trainer.io.untrusted import DECODED
from wsi_trainer.regions.target import open_labels
from wsi_trainer.slide.formats.base import GIGAPIXELS
from wsi_trainer.slide.slide import Slide
from wsi_trainer.store.convert import Job, Settings, convert

PIXELS = np.random.default_rng(4).integers(0, 256, (128, 128, 3), np.uint8)
RGB = {"photometric": "rgb", "tile": (64, 64)}
Change = Callable[[bytearray, tifffile.TiffFile], None]


def _changed(path: Path, change: Change, **options: object) -> Path:
    """A good TIFF with some bytes written over."""
    tifffile.imwrite(path, PIXELS, **{**RGB, **options})
    data = bytearray(path.read_bytes())
    with tifffile.TiffFile(path) as tif:
        change(data, tif)
    path.write_bytes(data)
    return path


def _set(**tags: int) -> Change:
    """Writes values into tags of the first page."""

    def change(data: bytearray, tif: tifffile.TiffFile) -> None:
        for name, value in tags.items():
            tag = tif.pages[0].tags[name]
            form = {3: "<H", 4: "<I"}[int(tag.dtype)]
            struct.pack_into(form, data, tag.valueoffset, value)

    return change


def _refused(path: Path, reason: str) -> None:
    with pytest.raises(SlideError, match=reason) as caught, Slide.open(path) as reader:
        reader.read(0, 0, 0, min(128, reader.info.shape[0]), min(128, reader.info.shape[1]))
    assert "\n" not in str(caught.value)


# -- sizes that are declared


def _wide(path: Path, side: int, tile: int, count: int) -> Path:
    """A TIFF of a few bytes that declares any size."""
    entries = [
        (256, 4, 1, side), (257, 4, 1, side), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (277, 3, 1, 1),
        (322, 4, 1, tile), (323, 4, 1, tile), (324, 4, count, 8), (325, 4, count, 8),
    ]  # fmt: skip
    ifd = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *entry) for entry in entries) + b"\0" * 4
    path.write_bytes(b"II*\0" + struct.pack("<I", 16) + b"\0" * 8 + ifd)
    return path


@pytest.mark.parametrize("side", [1_000_000, 4_000_000_000])
def test_impossible_size(tmp_path: Path, side: int) -> None:
    _refused(_wide(tmp_path / "s.tif", side, 256, 1), rf"declares {side} x {side} px.* WSI_TRAIN_MAX_GIGAPIXELS=")


def test_one_impossible_tile(tmp_path: Path) -> None:
    path = _changed(tmp_path / "s.tif", _set(TileWidth=32768, TileLength=32768), compression="zlib")
    _refused(path, r"a tile of 32768x32768 px would take 3072 MiB .* WSI_TRAIN_MAX_DECODED_MIB=3072")


def test_limits_can_be_raised_and_lowered(slide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, value in ((GIGAPIXELS, "0.0001"), (DECODED, "0.01")):
        monkeypatch.setenv(limit.variable, value)
        with pytest.raises(SlideError, match=limit.variable):
            Slide.open(slide)
        monkeypatch.delenv(limit.variable)
    path = _wide(tmp_path / "s.tif", 1_000_000, 256, 1)
    monkeypatch.setenv(GIGAPIXELS.variable, "1000")
    _refused(path, "it needs 15264649 tiles and lists 1")


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_picture_that_inflates(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "s.png"
    if kind == "PNG":
        Image.new("1", (8, 8)).save(path)
        data = bytearray(path.read_bytes())
        struct.pack_into(">II", data, 16, 60_000, 60_000)
        struct.pack_into(">I", data, 29, zlib.crc32(data[12:29]))
        path.write_bytes(data)
    else:
        stream = io.BytesIO()
        Image.new("L", (8, 8)).save(stream, "JPEG")
        data = bytearray(stream.getvalue())
        at = data.index(b"\xff\xc0")
        struct.pack_into(">HH", data, at + 5, 60_000, 60_000)
        path.write_bytes(data)
    _refused(path, f"a {kind} of 60000 x 60000 px would take .* WSI_TRAIN_MAX_DECODED_MIB")


LARGE = np.zeros((512, 1024, 3), np.uint8)
INNER = {
    "jpeg": imagecodecs.jpeg8_encode(LARGE, colorspace="RGB"),
    "webp": imagecodecs.webp_encode(LARGE),
    "jpegxl": imagecodecs.jpegxl_encode(LARGE),
    "jpeg2000": imagecodecs.jpeg2k_encode(LARGE),
}


@pytest.mark.parametrize("compression", INNER)
def test_tile_that_holds_a_larger_image(tmp_path: Path, compression: str) -> None:
    tiles = (bytes(INNER[compression]) for _ in range(4))
    tifffile.imwrite(tmp_path / "s.tif", tiles, shape=PIXELS.shape, dtype="u1", compression=compression, **RGB)
    _refused(tmp_path / "s.tif", "tile 0 holds an image of 1024 x 512 px, the tile has 64 x 64 px")


# -- TIFF directories that are broken


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"II*\0", "ends after 4 bytes"),
        (b"MM\0*\0", "ends after 5 bytes"),
        (b"II*\0\x08\0\0\0", "there is no image where the header says"),
        (b"II*\0\xff\xff\xff\x7f", "there is no image where the header says"),
        (b"II+\0\x08\0\0\0", "broken TIFF"),
        (b"II+\0\x08\0\0\0" + b"\xff" * 8, "broken TIFF"),
        (b"II*\0\x08\0\0\0\xff\xff" + b"\xff" * 60, "broken TIFF"),
        (b"II*\0\x08\0\0\0\0\0\0\0\0\0", "broken TIFF|holds nothing"),
    ],
)
def test_headers_and_nothing_else(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "s.tif").write_bytes(content)
    _refused(tmp_path / "s.tif", reason)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_set(ImageWidth=0, ImageLength=0), "0 x 0 px, which holds nothing"),
        (_set(ImageWidth=0), "holds nothing"),
        (_set(ImageLength=100_000), "needs 3126 tiles and lists 4|broken TIFF"),
        (_set(TileWidth=0), "broken TIFF"),
        (_set(Compression=60000), "compression 60000 is not read through tifffile"),
        (_set(Compression=0), "compression 0 is not read"),
        (_set(BitsPerSample=0), "broken TIFF|bits"),
    ],
)
def test_fields_that_cannot_be(tmp_path: Path, change: Change, reason: str) -> None:
    _refused(_changed(tmp_path / "s.tif", change), reason)


# -- OME-XML

BOMB = (
    '<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "aaaaaaaaaa">'
    + "".join("<!ENTITY " + b + ' "' + f"&{a};" * 10 + '">' for a, b in zip("abcdefghi", "bcdefghij"))
    + ']><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><Image><Pixels>&j;</Pixels></Image></OME>'
)
OUTSIDE = (
    '<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]>'
    '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><Image Name="&a;"><Pixels/></Image></OME>'
)
BROKEN = '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><Image></OME>'


@pytest.mark.parametrize("xml", [BOMB, OUTSIDE], ids=["bomb", "outside"])
def test_xml_that_declares_entities_is_refused(tmp_path: Path, xml: str, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.ome.tif"
    tifffile.imwrite(path, PIXELS, description=xml, metadata=None, **RGB)
    _refused(path, "its OME-XML declares entities")
    assert capfd.readouterr() == ("", ""), "the library says nothing of its own"


def test_xml_that_is_broken_says_nothing_of_sizes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.ome.tif"
    tifffile.imwrite(path, PIXELS, description=BROKEN, metadata=None, **RGB)
    with Slide.open(path) as reader:
        assert reader.info.mpp is None
    assert capfd.readouterr() == ("", "")


def _ome_naming(path: Path, name: str, own: str = "") -> Path:
    """An OME-TIFF whose pixels are said to lie in a file of this name."""
    root = f' UUID="{own}"' if own else ""
    xml = (
        f'<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"{root}><Image ID="Image:0"><Pixels '
        'ID="Pixels:0" DimensionOrder="XYCZT" Type="uint8" SizeX="128" SizeY="128" SizeC="3" SizeZ="1" SizeT="1" '
        'PhysicalSizeX="0.5" PhysicalSizeY="0.5"><Channel ID="Channel:0:0" SamplesPerPixel="3"/><TiffData IFD="0" '
        f'PlaneCount="1"><UUID FileName="{name}">urn:uuid:1</UUID></TiffData></Pixels></Image></OME>'
    )
    tifffile.imwrite(path, PIXELS, description=xml, metadata=None, **RGB)
    return path


@pytest.mark.parametrize("own", ["", "urn:uuid:2"])
def test_a_file_that_ome_xml_names_is_not_opened(
    tmp_path: Path, own: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither in another folder nor in that of the process; a pipe would be waited for."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret").write_bytes(b"root:x:0")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "sent").mkdir()
    for name in ("../secret", str(tmp_path / "secret"), "pipe", str(tmp_path / "pipe")):
        path = _ome_naming(tmp_path / "sent" / "s.ome.tif", name, own)
        _refused(path, "says that pixels lie in '.*', and other files are not opened")
        with pytest.raises(SlideError, match="other files are not opened"):
            open_labels(path)
    assert "root:" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("named", "own"), [("s.ome.tif", ""), ("S.OME.TIF", ""), ("s.ome.tif", "urn:uuid:2"), ("was.ome.tif", "urn:uuid:1")]
)
def test_an_ome_tiff_that_names_itself_is_read(
    tmp_path: Path, named: str, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name, or by its identifier after it was renamed; not a file of its name where the process works."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.ome.tif").write_bytes(b"something else")
    (tmp_path / "sent").mkdir()
    with Slide.open(_ome_naming(tmp_path / "sent" / "s.ome.tif", named, own)) as slide:
        assert slide.info.mpp == (0.5, 0.5)
        np.testing.assert_array_equal(slide.read(0, 0, 0, 128, 128), PIXELS)


def test_a_tile_of_more_bytes_than_numbers_hold(tmp_path: Path) -> None:
    _refused(_wide(tmp_path / "s.tif", 128, 2**31, 1), "a tile of 2147483648x2147483648 px would take .* MiB")


# -- chunks


@pytest.mark.parametrize("kind", ["device", "pipe", "huge"])
@pytest.mark.parametrize("version", [2, 3])
def test_a_chunk_that_is_no_file_or_too_large_is_refused_at_once(tmp_path: Path, kind: str, version: int) -> None:
    path = _store(tmp_path / "s.zarr", lambda first: None)
    if version == 3:
        root = zarr.open_group(path, mode="a")
        attributes = dict(root.attrs)
        shutil.rmtree(path)
        root = zarr.create_group(path, zarr_format=3, attributes={"ome": {"version": "0.5", **attributes}})
        root.create_array("0", shape=(3, 64, 64), chunks=(1, 32, 32), dtype="u1")
    array = zarr.open_group(path, mode="r+")["0"]
    array[:] = 7
    chunk = next(file for file in (path / "0").rglob("*") if file.name.startswith("0.0") or file.parent.name == "0")
    chunk.unlink()
    if kind == "device":
        chunk.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(chunk)
    else:
        with chunk.open("wb") as file:
            file.truncate(1 << 40)
    reason = "more than the limit" if kind == "huge" else f"is a {'named pipe' if kind == 'pipe' else 'device'} and not"
    with pytest.raises(SlideError, match=reason), Slide.open(path) as slide:
        slide.read(0, 0, 0, 64, 64)
    with pytest.raises(UserError, match=reason):
        _ = open_zarr_array(path / "0")[:]


def test_a_shard_of_a_store_that_is_a_pipe_is_damage(slide: Path, tmp_path: Path) -> None:
    convert(Job(slide, "s"), tmp_path, Settings(chunk=64, shard=256, tissue="none"))
    shard = tmp_path / "s.zarr" / "0" / "c" / "0" / "0" / "0"
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(SlideError, match="damaged: 0/c/0/0/0 is missing"):
        Slide.open(tmp_path / "s.zarr")


def test_chunks_that_hold_nothing(tmp_path: Path) -> None:
    path = _store(tmp_path / "s.zarr", lambda first: None)
    file = path / "0" / ".zarray"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chunks": [1, 0, 32]}))
    with pytest.raises(SlideError) as caught:
        Slide.open(path)
    assert "division" not in str(caught.value)


# -- stores


def _store(path: Path, change: Callable[[dict], None], shape: tuple[int, ...] = (3, 64, 64), **options: object) -> Path:
    root = zarr.open_group(path, mode="w", zarr_format=2)
    root.create_array("0", shape=shape, chunks=(1, 32, 32), dtype="u1", **options)
    axes = [{"name": "c", "type": "channel"}] + [{"name": n, "type": "space", "unit": "micrometer"} for n in "yx"]
    steps = [{"type": "scale", "scale": [1, 0.5, 0.5]}]
    first = {"version": "0.4", "axes": axes, "datasets": [{"path": "0", "coordinateTransformations": steps}]}
    change(first)
    root.attrs["multiscales"] = [first]
    return path


def _steps(value: object) -> Callable[[dict], None]:
    return lambda first: first["datasets"][0].update(coordinateTransformations=value)


STORES: dict[str, tuple[Callable[[dict], None], str]] = {
    "no datasets": (lambda first: first.update(datasets=[]), "lists no datasets"),
    "datasets that are no list": (lambda first: first.update(datasets={"0": 1}), "datasets is .*expected a list"),
    "datasets of numbers": (lambda first: first.update(datasets=[1]), "datasets has 1; expected a mapping"),
    "path of a number": (lambda first: first["datasets"][0].update(path=0), "path is 0; expected a name"),
    "path outside": (lambda first: first["datasets"][0].update(path="../../x"), "expected a name inside the store"),
    "absolute path": (lambda first: first["datasets"][0].update(path="/etc"), "expected a name inside the store"),
    "level that is missing": (lambda first: first["datasets"].append({"path": "7"}), "level '7' .* is missing"),
    "too few axes": (lambda first: first.update(axes=first["axes"][1:]), r"3 dimensions has the axes \['y', 'x'\]"),
    "axis twice": (lambda first: first["axes"][0].update(name="x"), "expected different letters"),
    "axis without a name": (lambda first: first["axes"][0].clear(), "expected different letters"),
    "no x": (lambda first: first["axes"][2].update(name="t"), "expected y and x"),
    "axes that are no list": (lambda first: first.update(axes="cyx"), "axes is 'cyx'; expected a list"),
}
SCALES: dict[str, tuple[Callable[[dict], None], str | None]] = {
    "strings": (_steps([{"type": "scale", "scale": ["1", "a", "b"]}]), "scale = .*'a'"),
    "too few": (_steps([{"type": "scale", "scale": [1]}]), r"scale = \[1\]"),
    "nan": (_steps([{"type": "scale", "scale": [1, float("nan"), 1]}]), "scale = .*nan"),
    "no transformations": (lambda first: first["datasets"][0].pop("coordinateTransformations"), None),
    "null": (_steps(None), None),
    "of another type": (_steps([{"type": "identity"}]), None),
    "unit of the stars": (lambda first: first["axes"][1].update(unit="parsec"), "unit = 'parsec'"),
}


@pytest.mark.parametrize("kind", STORES)
def test_stores_with_odd_metadata(tmp_path: Path, kind: str) -> None:
    change, reason = STORES[kind]
    _refused(_store(tmp_path / "s.zarr", change), reason)


@pytest.mark.parametrize("kind", SCALES)
def test_stores_with_odd_scales(tmp_path: Path, kind: str) -> None:
    change, quoted = SCALES[kind]
    with Slide.open(_store(tmp_path / "s.zarr", change)) as reader:
        assert reader.info.mpp is None
        assert reader.info.unreadable is None if quoted is None else True
        if quoted is not None:
            import re

            assert re.search(quoted, reader.info.unreadable or "")


def test_store_that_declares_everything(tmp_path: Path) -> None:
    path = _store(tmp_path / "s.zarr", lambda first: None, shape=(3, 1_000_000, 1_000_000))
    _refused(path, "declares 1000000 x 1000000 px")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "broken zarr store"),
        ("[]", "broken zarr store"),
        ("[" * 100_000, "broken zarr store"),
        ("{}", "without OME-NGFF multiscales"),
        ('{"zarr_format": 3, "node_type": "group", "attributes": {"ome": "x"}}', "without OME-NGFF multiscales"),
        ('{"zarr_format": 3, "node_type": "group", "attributes": {"ome": {"plate": {}}}}', "without OME-NGFF"),
    ],
)
def test_stores_that_say_nothing(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "s.zarr").mkdir()
    (tmp_path / "s.zarr" / "zarr.json").write_text(content)
    _refused(tmp_path / "s.zarr", reason)


def test_pickled_chunks_are_not_run(tmp_path: Path) -> None:
    """A codec of a store is code that is run on its chunks, and this one runs whatever the chunk says."""
    witness = tmp_path / "witness"

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (witness,)

    import pickle

    path = _store(tmp_path / "s.zarr", lambda first: None, compressors=None)
    file = path / "0" / ".zarray"
    stored = json.loads(file.read_text())
    file.write_text(json.dumps({**stored, "compressor": {"id": "pickle", "protocol": 5}}))
    (path / "0" / "0.0.0").write_bytes(pickle.dumps(Evil()))
    _refused(path, "pickle")
    assert not witness.exists()


# -- formats of several files


@pytest.fixture
def mrxs(tmp_path: Path) -> Path:
    """An index file that looks like a JPEG, and a folder with what it names."""
    path = tmp_path / "m.mrxs"
    Image.new("RGB", (32, 32)).save(path, "JPEG")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "Slidedat.ini").write_text(
        "\ufeff[GENERAL]\nSLIDE_ID = 1\n[HIERARCHICAL]\nINDEXFILE = Index.dat\n[DATAFILE]\nFILE_COUNT = 2\n"
        "FILE_0 = Data0000.dat\nFILE_1 = Data0001.dat\n"
    )
    for name in ("Index.dat", "Data0000.dat", "Data0001.dat"):
        (tmp_path / "m" / name).write_bytes(b"?")
    return path


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ("", "data folder m/ is not beside it"),
        ("Slidedat.ini", "m/Slidedat.ini is missing"),
        ("Data0001.dat", "m/Data0001.dat is missing"),
        ("Index.dat", "m/Index.dat is missing"),
    ],
)
def test_mrxs_of_which_something_is_missing(mrxs: Path, missing: str, reason: str) -> None:
    if missing:
        (mrxs.parent / "m" / missing).unlink()
    else:
        shutil.rmtree(mrxs.parent / "m")
    _refused(mrxs, reason)


# -- OpenSlide ends the process, or shows another level, where it trusts what a file says of its own parts


@pytest.mark.parametrize("frame", [1, 5, 12])
@pytest.mark.parametrize("place", [0, 7, 1 << 20, (1 << 32) - 1])
def test_a_dicom_whose_frames_lie_where_none_can_be_is_refused(tmp_path: Path, frame: int, place: int) -> None:
    write_slide(tmp_path, "slide", levels=1)
    path = tmp_path / "slide_0.dcm"
    data = bytearray(path.read_bytes())
    table = data.index(b"\xfe\xff\x00\xe0" + struct.pack("<I", 4 * 12)) + 8
    known = struct.unpack_from("<12I", data, table)
    struct.pack_into("<I", data, table + 4 * (frame - 1), place)
    path.write_bytes(data)
    found = [place if i == frame - 1 else at for i, at in enumerate(known)]
    if found == sorted(set(found)) and found[-1] < len(data):
        with Slide.open(tmp_path) as reader:  # nothing speaks against it, but that no frame begins there
            assert reader.info.shape == (200, 160)
    else:
        _refused(tmp_path, r"slide_0\.dcm has frame \d+ where none can be: damaged or cut off")


def test_an_ndpi_whose_finest_level_is_left_out_is_refused(tmp_path: Path, real_slides: Path) -> None:
    path, good = tmp_path / "slide.ndpi", real_slides / "test3-DAPI-2-(387).ndpi"
    data = bytearray(good.read_bytes())
    with tifffile.TiffFile(good) as tif:
        page = tif.pages[0]
        struct.pack_into("<i", data, page.tags[65424].valueoffset, 3000)
        size = f"{page.imagewidth} x {page.imagelength}"
    path.write_bytes(data)
    _refused(path, f"its finest level, {size} px, is marked as out of focus")


@pytest.mark.parametrize("value", ["0", "-1", "much", "nan", "1,5"])
def test_limits_that_are_none(slide: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(GIGAPIXELS.variable, value)
    with pytest.raises(UserError, match=rf"WSI_TRAIN_MAX_GIGAPIXELS={value}: expected a number above 0"):
        Slide.open(slide)


def test_array_without_a_group(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "s.zarr", data=np.zeros((3, 8, 8), "u1"))
    _refused(tmp_path / "s.zarr", "a zarr array and not a group")


def test_levels_that_grow(tmp_path: Path) -> None:
    path = _store(tmp_path / "s.zarr", lambda first: first["datasets"].append({"path": "1"}))
    zarr.open_group(path).create_array("1", shape=(3, 128, 128), chunks=(1, 32, 32), dtype="u1")
    _refused(path, "expected the largest first")


def test_codecs_that_are_not_known_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever codec is installed would be run on the bytes of the store."""
    import numcodecs

    class Spy(numcodecs.abc.Codec):
        codec_id = "spy"

        def encode(self, buf: object) -> object:
            return buf

        def decode(self, buf: object, out: object = None) -> object:
            pytest.fail("the codec is run")

    numcodecs.register_codec(Spy)
    path = _store(tmp_path / "s.zarr", lambda first: None, compressors=None)
    file = path / "0" / ".zarray"
    file.write_text(json.dumps({**json.loads(file.read_text()), "filters": [{"id": "spy"}]}))
    (path / "0" / "0.0.0").write_bytes(bytes(32 * 32))
    _refused(path, "stored with 'spy', which is not run")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda polygon: polygon,
        lambda polygon: {"type": "Feature", "geometry": polygon},
        lambda polygon: {"type": "FeatureCollection", "features": [{"type": "Feature", "geometry": polygon}]},
        lambda polygon: {"type": "GeometryCollection", "geometries": [polygon, {"type": "Point", "coordinates": [1]}]},
        lambda polygon: {"type": "MultiPolygon", "coordinates": [polygon["coordinates"]]},
    ],
)
def test_outlines_in_all_wrappings(tmp_path: Path, wrap: Callable[[dict], dict]) -> None:
    from wsi_trainer.slide.tissue import draw_tissue

    path = tmp_path / "s.geojson"
    path.write_text(json.dumps(wrap({"type": "Polygon", "coordinates": [SQUARE]})))
    assert draw_tissue(path, (40, 40), 16, (16.0, 16.0)).mask.sum() == pytest.approx((300 / 16) ** 2, rel=0.1)


SQUARE = [[0, 0], [300, 0], [300, 300], [0, 300]]
