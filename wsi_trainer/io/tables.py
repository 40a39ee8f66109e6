"""Tables that people wrote: CSV files in any usual encoding, every oddity told with its line.

They come from spreadsheets: with a mark at the beginning, in UTF-16 or in the encoding of a language, with a quote that
nobody closed. What can be read for sure is read, and the rest is refused in one line.
"""

from __future__ import annotations

import codecs
import csv
import io
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from wsi_trainer.errors import UserError
from wsi_trainer.io.display import clean
from wsi_trainer.io.files import replace_file
from wsi_trainer.io.untrusted import read_bytes

log = logging.getLogger("wsi_trainer")

_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
#: A formula to a spreadsheet; and what `escape_formula` has made of one, so that each text has its own.
_LIVE = re.compile(r"'*[=+\-@\t\r\n]")
_SEPARATORS = {";": "semicolons", "\t": "tabs"}


@dataclass(frozen=True)
class Table:
    """The columns and the rows of a file, each row with the line that it ends in."""

    path: Path
    columns: tuple[str, ...]
    rows: tuple[tuple[int, dict[str, str]], ...]

    def need(self, *columns: str) -> None:
        """Refuse a table without these columns."""
        for column in columns:
            if column not in self.columns:
                raise UserError(f"{self.path} has no column {column!r}; {self._have(column)}")

    def _have(self, column: str) -> str:
        _check_separator(self.path, self.columns)
        alike = [name for name in self.columns if name.strip().lower() == column.lower()]
        hint = f" (write {column!r} instead of {alike[0]!r})" if alike else ""
        return f"its columns are {', '.join(self.columns) or 'none'}{hint}"


def read_table(path: Path, separator: str = ",", cut: bool = False) -> Table:
    """Read a CSV file, or one with another separator.

    Args:
        path: The file.
        separator: The character between cells.
        cut: Pass over lines that are too short: a program that was killed may have been writing one.

    Raises:
        UserError: It is no table: says in which line and why.
    """
    rows: list[tuple[int, dict[str, str]]] = []
    columns: tuple[str, ...] = ()
    reader = csv.reader(io.StringIO(_text_of(path), newline=""), strict=True, delimiter=separator)
    try:
        for cells in reader:
            if not any(cells):
                continue
            if not columns:
                columns = _header(path, cells)
                continue
            while len(cells) > len(columns) and not cells[-1]:
                cells.pop()  # a spreadsheet pads rows
            if cut and len(cells) < len(columns):
                continue
            if len(cells) != len(columns):
                _check_separator(path, columns)
                raise UserError(
                    f"{path}, line {reader.line_num}: it has {len(cells)} cells, and the first line {len(columns)}"
                )
            rows.append((reader.line_num, dict(zip(columns, cells))))
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: {_reason(error)}") from error
    return Table(path, columns, tuple(rows))


def _check_separator(path: Path, columns: Sequence[str]) -> None:
    for separator, name in _SEPARATORS.items():
        if len(columns) == 1 and separator in columns[0]:
            raise UserError(f"{path}: its cells are separated by {name}: save it with commas")


def _header(path: Path, cells: Sequence[str]) -> tuple[str, ...]:
    while cells and not cells[-1]:
        cells = cells[:-1]
    name, count = Counter(cells).most_common(1)[0]
    if count > 1:
        raise UserError(f"{path} has the column {name!r} {count} times; each column has a name of its own")
    return tuple(cells)


def _reason(error: csv.Error) -> str:
    text = str(error)
    if "unexpected end of data" in text:
        return 'a quote (") is opened and never closed'
    if "field larger than" in text:
        return f'a cell has more than {csv.field_size_limit()} characters; is a quote (") not closed?'
    if "expected after" in text:
        return 'there is text after a closing quote ("); a quote within a cell is written twice'
    return text


def _text_of(path: Path) -> str:
    data = read_bytes(path)
    encoding = next((name for mark, name in _MARKS.items() if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        if encoding != "utf-8":
            raise UserError(
                f"{path} begins as {encoding.upper()} and goes on as something else; save it as UTF-8"
            ) from error
        encoding, text = "Windows-1252", _western(data)
    if "\0" in text:
        raise UserError(
            f"{path} holds NUL bytes: it is no CSV file, or one in UTF-16 without its mark; save it as UTF-8"
        )
    if encoding not in ("utf-8", "utf-8-sig"):
        _tell(path, encoding)
    return text


def _western(data: bytes) -> str:
    try:
        return data.decode("cp1252")
    except UnicodeDecodeError:  # five bytes have no meaning there
        return data.decode("latin-1")


@cache
def _tell(path: Path, encoding: str) -> None:
    log.warning("%s is not UTF-8; it is read as %s: look at its names, and save it as UTF-8", clean(path), encoding)


def micrometres(text: str, where: str) -> float | None:
    """The size of a pixel from a cell, or None from an empty one."""
    text = text.strip()
    try:
        value = float(text) if text else None
    except ValueError:
        value = float("nan")
    if value is not None and not 0 < value < 1000:
        raise UserError(f"{where}: mpp is {text!r}; expected micrometres per pixel")
    return value


def table_bytes(columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> bytes:
    """A CSV file as bytes; bytes of names that are not text are written as escapes."""
    return lines_of([columns]) + lines_of([row.get(column, "") for column in columns] for row in rows)


def lines_of(rows: Iterable[Sequence[object]]) -> bytes:
    """Lines of a CSV file as bytes."""
    text = io.StringIO()
    plain = csv.writer(text, lineterminator="\n")
    quoting = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)  # Python before 3.13 forgets a lone \r
    for cells in rows:
        (quoting if any("\r" in str(cell) for cell in cells) else plain).writerow(cells)
    return os.fsencode(text.getvalue()).decode("utf-8", "backslashreplace").encode()


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]], keep: bool = False) -> None:
    """Write a CSV file for people, whole or not at all: a spreadsheet takes no text in it for a formula.

    Args:
        path: The file; its folder is made.
        columns: The first line.
        rows: Row by row the cells; only those that are texts can be formulas.
        keep: Write texts as they are, where other programs read the file too, as a manifest.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lines_of([columns]) + lines_of(row if keep else list(map(escape_formula, row)) for row in rows))


def append_row(path: Path, columns: Sequence[str], row: Sequence[object]) -> None:
    """Add a line to a CSV file for people, which begins with the columns."""
    new = b"" if path.is_file() else lines_of([columns])
    with path.open("ab") as file:
        file.write(new + lines_of([list(map(escape_formula, row))]))


def escape_formula(value: object) -> object:
    """A cell of a table made for people: what a spreadsheet would take for a formula is text to it."""
    return f"'{value}" if isinstance(value, str) and _LIVE.match(value) else value


def unescape_formula(text: str) -> str:
    """The text that `escape_formula` was given."""
    return text[1:] if text.startswith("'") and _LIVE.match(text) else text
