"""Text: outlines in GeoJSON and XML, manifests and other tables, maps and what is said of them."""

from __future__ import annotations

import csv
import io
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.kinds import Target, Unjudged
from tests.fuzz.mutations import BINARY, TEXT
from wsi_trainer.data import read_manifest
from wsi_trainer.fit.run_folder import RunFolder
from wsi_trainer.metrics import Predictions, read_predictions
from wsi_trainer.regions.files import read_regions
from wsi_trainer.view.contents import MapFile, maps_of

SQUARE = [[10.0, 10.0], [60.0, 10.0], [60.0, 60.0], [10.0, 60.0], [10.0, 10.0]]


def geojsons(folder: Path) -> Sequence[Path]:
    hole = [[20, 20], [30, 20], [30, 30], [20, 20]]
    features = [
        {"type": "Feature", "properties": {"classification": {"name": "Tumor", "color": [200, 0, 0]}},
         "geometry": {"type": "Polygon", "coordinates": [SQUARE, hole]}},
        {"type": "Feature", "properties": {"classification": {"names": ["a", "b"]}},
         "geometry": {"type": "MultiPolygon", "coordinates": [[SQUARE], [hole]]}},
        {"type": "Feature", "properties": {}, "geometry": {"type": "Point", "coordinates": [1, 2]}},
    ]  # fmt: skip
    (folder / "drawn.geojson").write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    (folder / "list.geojson").write_text(json.dumps(features))
    return [folder / "drawn.geojson", folder / "list.geojson"]


def corners(path: Path) -> Any:
    return [np.round(ring, 6).tolist() for region in read_regions(path) for ring in region.rings]


def geojson_truth(path: Path) -> Any:
    """All rings, found by their depth: lists of pairs below `coordinates` of areas, wherever an area may stand."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise Unjudged from error

    def areas(value: Any) -> Iterator[Any]:
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, list):
                yield from areas(one)
            elif one.get("type") == "FeatureCollection":
                yield from areas(one["features"])
            elif one.get("type") == "Feature":
                yield from areas([one["geometry"]] if one["geometry"] is not None else [])
            elif one.get("type") == "Polygon":
                yield [one["coordinates"]]
            elif one.get("type") == "MultiPolygon":
                yield one["coordinates"]
            elif one.get("type") == "GeometryCollection":
                raise Unjudged

    return [
        [[round(float(x), 6) for x in point[:2]] for point in ring]
        for polygons in areas(content) for rings in polygons for ring in rings
    ]  # fmt: skip


def asaps(folder: Path) -> Sequence[Path]:
    points = "".join(f'<Coordinate Order="{i}" X="{x}" Y="{y}"/>' for i, (x, y) in enumerate(SQUARE[:4]))
    one = f'<Annotation Name="A" Type="Polygon" PartOfGroup="Tumor"><Coordinates>{points}</Coordinates></Annotation>'
    text = f'<?xml version="1.0"?><ASAP_Annotations><Annotations>{one}{one}</Annotations></ASAP_Annotations>'
    (folder / "drawn.xml").write_text(text)
    vertices = "".join(f'<Vertex X="{x}" Y="{y}"/>' for x, y in SQUARE[:4])
    layer = f'<Annotation Name="L"><Regions><Region Type="0"><Vertices>{vertices}</Vertices></Region></Regions>'
    (folder / "aperio.xml").write_text(f"<Annotations>{layer}</Annotation></Annotations>")
    return [folder / "drawn.xml", folder / "aperio.xml"]


def xml_truth(path: Path) -> Any:
    """The corners of all shapes that have an area, as ElementTree has them."""
    try:
        root = ElementTree.fromstring(path.read_bytes())
    except Exception as error:
        raise Unjudged from error
    found = []
    aperio = root.tag == "Annotations"
    for one in root.iter("Region" if aperio else "Annotation"):
        kind = one.get("Type", "0" if aperio else "Polygon").lower()
        if kind in ("3", "4", "ruler", "arrow", "pin", "1line") if aperio else kind not in (
            "polygon", "rectangle", "spline"
        ):  # fmt: skip
            continue
        if any(inner is not one for inner in one.iter(one.tag)):
            raise Unjudged  # one in another: which is meant?
        points = [p for p in one.iter() if p.tag in (("V", "Vertex") if aperio else ("Coordinate",))]
        if not aperio:
            points.sort(key=lambda p: int(p.get("Order", "")))
        try:
            found.append([[round(float(p.get(axis, "")), 6) for axis in "XY"] for p in points])
        except ValueError as error:
            raise Unjudged from error
    return found


def manifests(folder: Path) -> Sequence[Path]:
    lines = ["slide,label,patient,split,site,mpp"]
    lines += [f"slide {i}.tif,{'ab'[i % 2]},p{i // 2},{('train', 'val', 'test')[i // 2 % 3]},A,0.5" for i in range(8)]
    (folder / "manifest.csv").write_text("\n".join(lines) + "\n")
    return [folder / "manifest.csv"]


def read_records(path: Path) -> Any:
    return [[r.slide, r.label, r.patient, r.split, r.site, r.others.get("mpp", "")] for r in read_manifest(path)]


def manifest_truth(path: Path) -> Any:
    try:
        text = path.read_bytes().decode("utf-8-sig")
        rows = list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
    except (ValueError, csv.Error) as error:
        raise Unjudged from error
    if "\0" in text or any(None in row for row in rows):
        raise Unjudged
    found = []
    for row in rows:
        cell = {key: (value or "").strip() for key, value in row.items()}
        if any(cell.values()):
            slide = cell.get("slide", "")
            patient = cell.get("patient", "") or Path(slide).name  # the slide's own name, without its folder
            found.append([slide, cell.get("label", ""), patient, *(cell.get(k, "") for k in ("split", "site", "mpp"))])
    return found


def predictions(folder: Path) -> Sequence[Path]:
    first = np.linspace(0.1, 0.9, 6)
    names = tuple(f"=slide {i}" for i in range(6))
    said = Predictions(names, names, ("a", "b"), np.arange(6) % 2, np.stack([first, 1 - first], axis=1))
    said.write(folder / "test.csv")
    return [folder / "test.csv"]


def read_said(path: Path) -> Any:
    found = read_predictions(path)
    if not isinstance(found, Predictions):
        raise Unjudged
    return [list(found.slides), list(found.patients), np.round(found.probabilities, 12).tolist()]


def said_truth(path: Path) -> Any:
    try:
        text = path.read_bytes().decode("utf-8-sig")
        rows = [r for r in csv.DictReader(io.StringIO(text, newline=""), strict=True) if any(r.values())]
        chances = [k for k in rows[0] if k.startswith("probability")]
        values = [[round(float(row[k]), 12) for k in chances] for row in rows]
    except Exception as error:
        raise Unjudged from error
    if "\0" in text:
        raise Unjudged

    def plain(cell: str) -> str:
        return cell[1:] if cell.startswith("'") and cell.lstrip("'")[:1] in tuple("=+-@") else cell

    return [[plain(row["slide"]) for row in rows], [plain(row["patient"]) for row in rows], values]


def maps(folder: Path) -> Sequence[Path]:
    np.save(folder / "map.npy", np.random.default_rng(0).normal(size=(20, 30)).astype(np.float32))
    return [folder / "map.npy"]


def read_map(path: Path) -> Any:
    return np.array(MapFile(path, "map", "a", 8, 1).load())


def map_truth(path: Path) -> Any:
    """A header of version 1 by hand, and the numbers behind it."""
    data = path.read_bytes()
    try:
        end = 10 + int.from_bytes(data[8:10], "little")
        words = data[10:end].decode("latin1").replace("(", "[").replace(")", "]").replace(",]", "]")
        said = json.loads(words.replace("'", '"').replace("False", "false").replace("True", "true").replace(", }", "}"))
        if data[:8] != b"\x93NUMPY\x01\x00":
            raise Unjudged
        count = int(np.prod(said["shape"]))
        found = np.frombuffer(data, said["descr"], count, end)
        return found.reshape(said["shape"], order="F" if said["fortran_order"] else "C")
    except Unjudged:
        raise
    except Exception as error:
        raise Unjudged from error


def runs(folder: Path) -> Sequence[Path]:
    run = RunFolder(folder / "run")
    run.heatmaps.mkdir(parents=True)
    (run.path / "config.yaml").write_text("data: {downsample: 2}\n")
    (run.heatmaps / "map.ome.zarr").mkdir()
    (run.heatmaps / "map.ome.zarr" / "zarr.json").write_text('{"attributes": {"wsi_trainer": {"stride": 8}}}')
    said = {"class": "b", "method": "m", "slides": {"s.tif": {"array": "map.npy", "layer": "map.ome.zarr"}}}
    (run.heatmaps / "heatmaps.json").write_text(json.dumps(said))
    return [run.path]


def read_maps(path: Path) -> Any:
    found = maps_of(RunFolder(path))
    for one in found.values():
        assert one.path.resolve().is_relative_to(path.resolve()), "a file outside of the run"
    return sorted(found)


def runs_truth(path: Path) -> Any:
    try:
        return sorted(json.loads((path / "heatmaps" / "heatmaps.json").read_bytes()).get("slides", {}))
    except Exception as error:
        raise Unjudged from error


TARGETS = (
    Target("geojson", geojsons, corners, geojson_truth, TEXT),
    Target("xml of regions", asaps, corners, xml_truth, TEXT),
    Target("manifest", manifests, read_records, manifest_truth, TEXT),
    Target("predictions", predictions, read_said, said_truth, TEXT),
    Target("map", maps, read_map, map_truth, (*BINARY, *TEXT)),
    Target("run folder", runs, read_maps, runs_truth, TEXT, "**/*"),
)
