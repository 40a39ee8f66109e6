"""`PatchTable`: the patches of a slide as a table, for AnnData and SpatialData.

A row is a patch: its features, its place, and what a model says of it. Places are centres in pixels of level 0 of the
original slide. Both libraries are extras, and imported when a table is asked for.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.errors import UserError
from wsi_trainer.slide.geometry import Pair
from wsi_trainer.slide.places import Places

if TYPE_CHECKING:
    from anndata import AnnData
    from spatialdata import SpatialData

Kind = Literal["none", "anndata", "spatialdata", "both"]
SUFFIXES: Mapping[str, str] = {"anndata": ".h5ad", "spatialdata": ".spatialdata.zarr"}
"""Endings of the files, by the kind of table."""
EXTRAS: Mapping[str, str] = {"anndata": "anndata", "spatialdata": "spatial"}
"""The extra that has the library."""
PIXELS, MICROMETRES = "global", "micrometers"
"""Coordinate systems of SpatialData: pixels of level 0, and micrometres from its first pixel."""
SHAPES, TABLE, OF = "patches", "table", "wsi_trainer"
"""Names of the shapes and of their table, and of the facts in `uns`."""


def kinds_of(tables: Kind) -> tuple[str, ...]:
    """The kinds of tables that an option names; an error where the library of one is not installed."""
    kinds = {"none": (), "both": tuple(SUFFIXES)}.get(tables, (tables,))
    for kind in kinds:
        _import(kind)
    return kinds


def _import(kind: str) -> Any:
    try:
        return __import__(kind)
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install 'wsi-trainer[{EXTRAS[kind]}]'") from error


@dataclass(frozen=True, kw_only=True, eq=False)
class PatchTable:
    """The patches of a slide."""

    slide: str
    places: Places
    """Places of the patches, in pixels of level 0 of the original slide."""
    mpp: Pair | None
    """Micrometres per pixel there, y and x, where they are known."""
    features: NDArray[np.float32]
    """(patches, width)"""
    numbers: Mapping[str, NDArray[Any]]
    """A number of each patch, by name: contribution, and attention where the head has it."""
    prediction: Mapping[str, float]
    """The numbers predicted of the slide."""
    model: str
    target: str
    """The class that the numbers of patches speak for."""

    @property
    def side(self) -> float:
        """Pixels of level 0 along a side of a patch."""
        return self.places.spacing if self.places.side is None else self.places.side

    @property
    def centres(self) -> NDArray[np.float64]:
        """x and y of the middle of each."""
        return self.places.points if self.places.middle else self.places.points + self.side / 2

    def anndata(self) -> AnnData:
        """X has the features, `obs` the numbers of each patch and of its slide, `obsm["spatial"]` the centres."""
        anndata = _import("anndata")
        import pandas

        count, width = self.features.shape
        names = _texts([f"{self.slide}:{number}" for number in range(count)])
        obs = pandas.DataFrame({"slide": _same(self.slide, count), "patch": np.arange(count)}, index=names)
        for name, values in {**self.numbers, **self.prediction}.items():
            obs[name] = values
        var = pandas.DataFrame(index=_texts([f"feature_{number}" for number in range(width)]))
        facts = {"slide": self.slide, "model": self.model, "target": self.target, "side": float(self.side)}
        facts |= {"prediction": dict(self.prediction)}
        facts |= {} if self.mpp is None else {"mpp": np.array(self.mpp[::-1])}
        facts |= {} if self.places.slide is None else {"size": np.array(self.places.slide[::-1])}
        return anndata.AnnData(self.features, obs, var, uns={OF: facts}, obsm={"spatial": self.centres})

    def spatialdata(self) -> SpatialData:
        """The patches as squares, and the AnnData that is about them."""
        library = _import("spatialdata")
        from geopandas import GeoDataFrame
        from shapely import box
        from spatialdata.models import ShapesModel, TableModel
        from spatialdata.transformations import Identity, Scale

        table, half = self.anndata(), self.side / 2
        (x, y), numbers = self.centres.T, np.arange(len(self.features))
        systems: dict[str, Any] = {PIXELS: Identity()}
        if self.mpp is not None:
            systems[MICROMETRES] = Scale(list(self.mpp[::-1]), axes=("x", "y"))
        squares = GeoDataFrame(geometry=box(x - half, y - half, x + half, y + half), index=numbers)
        table.obs["region"] = _same(SHAPES, len(numbers))
        about = TableModel.parse(table, region=SHAPES, region_key="region", instance_key="patch")
        return library.SpatialData(
            shapes={SHAPES: ShapesModel.parse(squares, transformations=systems)}, tables={TABLE: about}
        )

    def write(self, path: Path, kind: str) -> None:
        """Write one of the two; what is there is replaced."""
        if kind == "anndata":
            self.anndata().write_h5ad(path)
            return
        shutil.rmtree(path, ignore_errors=True)
        self.spatialdata().write(path)


def _texts(values: Sequence[str]) -> Any:
    """An index of Python's texts: not every anndata can write those of pandas 3."""
    import pandas

    return pandas.Index(values, dtype=object)


def _same(text: str, count: int) -> Any:
    """One text in each row, as a category."""
    import pandas

    return pandas.Categorical.from_codes(np.zeros(count, np.int8), categories=_texts([text]))
