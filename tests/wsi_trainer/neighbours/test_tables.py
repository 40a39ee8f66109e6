"""Patches as AnnData and SpatialData, read back by these libraries: numbers and places are those of the run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from wsi_trainer.cli import main
from wsi_trainer.data.features import FeatureSource
from wsi_trainer.errors import UserError
from wsi_trainer.fit.run import Run
from wsi_trainer.slide import Slide


def test_a_table_of_anndata_has_what_the_run_says(on_patches: Path) -> None:
    anndata = pytest.importorskip("anndata", reason="the extra anndata is not installed")
    run = Run.open(on_patches / "run")
    assert main(["heatmap", str(run.path), "--method=attention", "--tables=anndata", "--tiles=0", "--top=0"]) == 0
    folder = run.maps("attention")
    entries = json.loads((folder / "heatmaps.json").read_text())["slides"]
    tables = [anndata.read_h5ad(folder / entry["tables"]["anndata"]) for entry in entries.values()]
    for name, table in zip(entries, tables, strict=True):
        source = FeatureSource(on_patches / "features" / f"{Path(name).stem}.h5")
        said = run.predictor.predict(on_patches / name)
        np.testing.assert_allclose(table.X, said.features, atol=1e-6)
        np.testing.assert_allclose(table.obs["attention"], said.attention.weights, rtol=1e-5)
        assert table.obs["attention"].sum() == pytest.approx(1, abs=1e-5)
        np.testing.assert_array_equal(table.obsm["spatial"], source.places.points + 16)
        assert set(table.obs["slide"]) == {name}
        assert set(table.obs["probability_1"]) == {said.to_dict()["probability_1"]}
        facts = table.uns["wsi_trainer"]
        assert facts["mpp"].tolist() == [0.5, 0.5] and (facts["side"], facts["model"]) == (32, "run")
        with Slide.open(on_patches / name) as slide:
            assert facts["size"].tolist() == [*slide.shape[::-1]]
        record = next(one for one in run.kept() if one.slide == name)
        with run.predictor.opened(record) as (batch, _):
            expected = run.predictor.attribute(batch, 1).values.flatten()
        np.testing.assert_allclose(table.obs["contribution"], expected, rtol=1e-4, atol=1e-7)
    assert len(anndata.concat(tables).obs_names.unique()) == sum(map(len, tables))
    other = run.predictor.predict(on_patches / next(iter(entries))).patches.anndata()
    np.testing.assert_array_equal(other.obsm["spatial"], tables[0].obsm["spatial"])


def test_spatialdata_has_the_patches_as_squares(on_patches: Path, tmp_path: Path) -> None:
    spatialdata = pytest.importorskip("spatialdata", reason="the extra spatial is not installed")
    table = Run.open(on_patches / "run").predictor.predict(on_patches / "s6.zarr").patches
    table.write(tmp_path / "s6.zarr", "spatialdata")
    found = spatialdata.read_zarr(tmp_path / "s6.zarr")
    squares, about = found.shapes["patches"], found.tables["table"]
    corners = squares.geometry.bounds[["minx", "miny"]].to_numpy()
    np.testing.assert_array_equal(corners, table.places.points)
    assert (squares.geometry.area == 32**2).all()
    for system, factor in (("global", 1), ("micrometers", 0.5)):
        moved = spatialdata.transform(squares, to_coordinate_system=system)
        centres = np.stack([moved.geometry.centroid.x, moved.geometry.centroid.y], axis=1)
        np.testing.assert_allclose(centres, about.obsm["spatial"] * factor)
    joined = spatialdata.join_spatialelement_table(found, spatial_element_names="patches", table_name="table")[1]
    np.testing.assert_array_equal(joined.obs["attention"], about.obs["attention"])
    np.testing.assert_allclose(about.X, table.features)


def test_a_library_that_is_absent_is_named(on_patches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "spatialdata", None)
    with pytest.raises(UserError, match=r"spatialdata is not installed: pip install 'wsi-trainer\[spatial\]'"):
        Run.open(on_patches / "run").predictor.predict(on_patches / "s6.zarr").patches.spatialdata()
