"""The seam through which every call to the system goes, and can be made to fail at its n-th.

It lies between the programs and the C library: a small library of functions with the names of the C library's, which
the loader finds first (`LD_PRELOAD`). So it costs the project's own code nothing, there is no layer of files of our own
to keep, and it is complete where a seam in Python cannot be: HDF5, OpenSlide, libtiff, PyTorch's readers and writers
and zarr's threads go through the C library like `os.pwrite`. What it counts is said by place and not by caller: calls
about files below one folder, in which a run has all its files (slides, results, temporary files, caches). Python's own
modules lie elsewhere and never fail.

All processes of a run share one `Setting`, a file that each has mapped: n counts their calls together, and what a
child does fails like what its parent does.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import mmap
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("seam.c")
#: Kinds of calls, in the order of seam.c.
CALLS = ("open", "make", "read", "write", "change", "look", "lock", "close", "map", "memory", "start")
#: What is done at the n-th, in the order of seam.c.
ACTIONS = (
    "through", "error", "short", "slow", "signal main", "signal group", "signal self", "hang", "clock", "pause",
)  # fmt: skip
FROM_THEN_ON = 1 << 40


#: Of the name of a file, what differs from run to run or counts files of one sort.
NAMES = re.compile(r"\d+|(?<=/tmp/)[^/]+|(?<=[./-])[a-z0-9_]{8}(?=$|[./])")


@dataclass(frozen=True)
class Site:
    """The kind of a call, and its function and file. A call about no file, for memory or a process, is one of its own.
    Files of one sort, as chunks of a store, have one name."""

    call: str
    about: str


class Setting(ctypes.Structure):
    """What fails, and what was seen; `State` in seam.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("armed", "main", "mask", "action", "value", "first", "times", "least")),
        *((name, ctypes.c_int64) for name in ("count", "fired")),
        *((name, ctypes.c_char * 256) for name in ("root", "below", "where")),
        ("what", ctypes.c_char * 64),
        ("list", ctypes.c_char * 256),
    )


def compiler() -> str | None:
    """The C compiler that builds the seam."""
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def built() -> Path:
    """The library, built where it is not there yet."""
    program = compiler()
    assert program is not None, "a C compiler is needed: apt-get install gcc"
    name = f"wsi-test-seam-{os.getuid()}-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"
    library = Path(tempfile.gettempdir()) / name
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / name
            command = [program, "-O1", "-shared", "-fPIC", "-o", str(made), str(SOURCE), "-ldl", "-lpthread"]
            subprocess.run(command, check=True)
            made.replace(library)
    return library


class Seam:
    """One setting in a file, and how processes are begun that obey it."""

    def __init__(self, file: Path, root: Path, new: bool = True) -> None:
        self.file, self.root = file, root
        if new:
            file.write_bytes(bytes(ctypes.sizeof(Setting)))
        with file.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), 0)
        self.setting = Setting.from_buffer(self._map)

    @classmethod
    def attached(cls, file: Path, root: Path) -> Seam:
        """The setting of a process that was begun with it."""
        return cls(file, root, new=False)

    @property
    def environment(self) -> Mapping[str, str]:
        return {"LD_PRELOAD": str(built()), "WSI_TEST_SEAM": str(self.file)}

    def arm(
        self, calls: Iterable[str], action: str, value: int = 0, *, first: int = 1, times: int = 1,
        below: str = "", least: int = 1 << 14, list_in: str = "",
    ) -> None:  # fmt: skip
        """In a run that begins from here, the first-th call of these kinds does this, so many times.

        Args:
            calls: Kinds of calls, of `CALLS`.
            action: One of `ACTIONS`.
            value: The number of the error or of the signal, microseconds, or seconds of a jump of the clock.
            first: n.
            times: How many calls in a row.
            below: A folder within the root; calls about other places are not counted.
            least: Bytes from which on memory is counted.
            list_in: A file that is to have a line for each call of any kind.
        """
        setting = self.setting
        setting.armed = 0
        ctypes.memset(ctypes.addressof(setting), 0, ctypes.sizeof(setting))
        setting.mask = sum(1 << CALLS.index(call) for call in calls)
        setting.action, setting.value = ACTIONS.index(action), value
        setting.first, setting.times, setting.least = first, times, least
        setting.root, setting.below, setting.list = map(os.fsencode, (self.root, below, list_in))

    def disarm(self) -> None:
        self.setting.armed = 0

    def sites(self, listed: Path) -> list[Site]:
        """The site of each call that a file lists."""
        found = []
        for number, line in enumerate(listed.read_text(errors="replace").splitlines()):
            op, what, where = line.split("\t", 2)
            name = NAMES.sub("#", where.replace(str(self.root), ""))
            found.append(Site(CALLS[int(op)], f"{what} {name or number}"))
        return found

    def struck(self) -> str:
        """The call that failed first."""
        name = {errno.errorcode.get(self.setting.value, "")} if ACTIONS[self.setting.action] == "error" else set()
        where = os.fsdecode(self.setting.where).replace(str(self.root), "")
        return " ".join([*name, os.fsdecode(self.setting.what), where])
