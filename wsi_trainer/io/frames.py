"""Tables as pandas' DataFrames, which notebooks want: out of a run, and in as a manifest.

pandas is an extra. Commands read and write CSV without it, and it is imported when a table is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from wsi_trainer.errors import UserError
from wsi_trainer.io.tables import Table

if TYPE_CHECKING:
    from pandas import DataFrame

A_FRAME = Path("the DataFrame")
"""What errors call a table that is no file."""


def frame(columns: Mapping[str, Sequence[Any]], index: str | None = None) -> DataFrame:
    """A DataFrame of columns.

    Args:
        columns: The cells of each.
        index: The column that names the rows.

    Raises:
        UserError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise UserError("tables need pandas, which is not installed: pip install 'wsi-trainer[notebook]'") from error
    made = pandas.DataFrame(dict(columns))
    return made if index is None else made.set_index(index)


def is_frame(table: object) -> TypeGuard[DataFrame]:
    """True for a DataFrame; whoever has one has imported pandas."""
    return isinstance(table, getattr(sys.modules.get("pandas"), "DataFrame", ()))


def table_of(given: DataFrame) -> Table:
    """The cells of a DataFrame as texts, as they would be in a CSV file; errors count its lines from 1.

    Raises:
        UserError: Two of its columns have one name.
    """
    columns = tuple(str(name) for name in given.columns)
    if twice := sorted({name for name in columns if columns.count(name) > 1}):
        raise UserError(f"{A_FRAME} has the column {twice[0]!r} twice; each column has a name of its own")
    rows = enumerate(given.itertuples(index=False, name=None), start=1)
    return Table(A_FRAME, columns, tuple((line, dict(zip(columns, map(_text, row)))) for line, row in rows))


def _text(cell: Any) -> str:
    """A cell as text. A whole number that pandas keeps as a float, since another cell is empty, has no point."""
    if cell is None or cell is getattr(sys.modules["pandas"], "NA", None) or cell != cell:
        return ""
    if isinstance(cell, float | np.floating) and float(cell).is_integer():
        return str(int(cell))
    return str(cell)
