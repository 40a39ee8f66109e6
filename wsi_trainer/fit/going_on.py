"""Going on with a run: it is not under way elsewhere, and what its config says is still what is asked for."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from wsi_trainer.errors import UserError
from wsi_trainer.fit.run_folder import RunFolder, as_written
from wsi_trainer.foreign import read_yaml
from wsi_trainer.slides.store.files import remove_half_written

PATIENCE = 10.0
"""Seconds to wait for another process to end: one that was just killed may hold the folder for a moment."""
FREE = ("model.pretrained",)
"""Keys of the model that say nothing to a run that goes on."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def alone_in(folder: RunFolder) -> Iterator[None]:
    """Keep other processes from training in the same folder; the system lifts this when the process dies."""
    lock = FileLock(folder.path / ".lock", timeout=PATIENCE, poll_interval=0.1)
    try:
        lock.acquire()
    except Timeout as error:
        raise UserError(
            f"{folder.path} is being written by another run; wait for its end (`wsi-train status` tells), or choose "
            "another --out"
        ) from error
    except (NotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
            raise
        yield  # a disk without locks, as some networks have: who starts two runs there has to look after it
        return
    try:
        remove_half_written(folder.path)
        yield
    finally:
        lock.release()


def changed(path: Path, asked: Mapping[str, Any]) -> list[str]:
    """What a config says otherwise than before, a sentence for each key.

    Raises:
        UserError: The network is another one, or trained otherwise, whose weights and optimizer a checkpoint holds.
    """
    with as_written(path):
        before, now = flat(read_yaml(path)), flat(asked)
    keys = [key for key in dict.fromkeys([*before, *now]) if before.get(key) != now.get(key) and key != "out"]
    fixed = [key for key in keys if key.startswith("model.") and key not in FREE]
    if fixed:
        key = fixed[0]
        raise UserError(
            f"{path}: {key} was {before.get(key)!r} and is {now.get(key)!r} now; a run goes on with the model that it "
            "began with. Take it back, or choose another --out"
        )
    return [f"{key} was {before.get(key)!r} and is {now.get(key)!r} from now on" for key in keys]


def flat(content: Any, name: str = "") -> dict[str, Any]:
    """The values of a config, by the whole names of their keys."""
    if not isinstance(content, Mapping) or not content:
        return {name: content}
    found: dict[str, Any] = {}
    for key, value in content.items():
        found |= flat(value, f"{name}.{key}" if name else str(key))
    return found
