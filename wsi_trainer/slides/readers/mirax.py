"""What an MRXS slide consists of: an index file, which looks like a JPEG, and a folder of the same name beside it."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

from wsi_trainer.foreign import read_bytes


def check_parts(path: Path) -> str | None:
    """What is missing of an MRXS slide; None if all its files are there, as far as its index says."""
    folder = path.with_suffix("")
    if not folder.is_dir():
        return f"its data folder {folder.name}/ is not beside it: copy both"
    index = folder / "Slidedat.ini"
    if not index.is_file():
        return f"{folder.name}/Slidedat.ini is missing: copy the whole folder"
    parser = configparser.ConfigParser(delimiters=("=",), strict=False, allow_no_value=True, interpolation=None)
    try:
        parser.read_string(read_bytes(index).decode("utf-8-sig", "replace"))
    except configparser.Error as error:
        return f"{folder.name}/Slidedat.ini is damaged: {error.message.splitlines()[0]}"
    wanted = [value for key, value in _section(parser, "DATAFILE").items() if re.fullmatch(r"file_\d+", key)]
    wanted += [value for key, value in _section(parser, "HIERARCHICAL").items() if key == "indexfile"]
    missing = [name for name in wanted if not (folder / Path(name.replace("\\", "/")).name).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more of its files are" if len(missing) > 1 else " is"
        return f"{folder.name}/{missing[0]}{more} missing: copy the whole folder"
    return None


def _section(parser: configparser.ConfigParser, name: str) -> dict[str, str]:
    return {key: value or "" for key, value in parser[name].items()} if parser.has_section(name) else {}
