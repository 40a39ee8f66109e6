"""Which disk is full, where an error does not say it. Imports only the standard library."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wsi_trainer.errors import UserError

SMALL = 1 << 20
"""Bytes: a disk with less is full."""
FULL = (errno.ENOSPC, errno.EDQUOT)


def about_disk(error: OSError, *folders: Path) -> str:
    """What an error of the system is about; a full disk is looked for among these folders."""
    if error.filename is not None:
        return f"{os.fspath(error.filename)}: {error.strerror}"
    if error.errno not in FULL:
        return str(error.strerror)
    places = dict.fromkeys(str(path) for path in (*folders, Path.cwd(), Path(tempfile.gettempdir())))
    full = [path for path in places if Path(path).exists() and shutil.disk_usage(path).free < SMALL]
    return f"{error.strerror}: the disk of {' and of '.join(full) or 'some folder'} is full"


@contextmanager
def naming_disks(*folders: Path) -> Iterator[None]:
    """What the system refuses here is said with the disk that it is about."""
    try:
        yield
    except OSError as error:
        if not error.strerror:
            raise
        raise UserError(about_disk(error, *folders)) from error
