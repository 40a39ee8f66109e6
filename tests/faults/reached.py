"""What the project calls of Python's own, and that the seam sees it.

`PRIMITIVES` has every function of `os`, `shutil`, `mmap`, `tempfile`, `subprocess` and the like that a module of the
project calls, and every method of files and paths that reads or writes, each with a small use of it; `HARMLESS` those
that touch no file, memory or process. `tests/test_faults.py` finds calls that are in neither, and runs each use with
every call of its kinds failing: one that succeeds goes past the seam.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
import subprocess
import tempfile
import threading
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.faults.seam import CALLS, FROM_THEN_ON, Seam


def opened(flags: int = os.O_RDWR) -> int:
    return os.open("file", flags)


def with_file(use: Callable[[int], object]) -> Callable[[], object]:
    """A use of a descriptor that was opened before."""

    def run() -> object:
        return use(FILE[0])

    return run


FILE: list[int] = []
PATH = Path("file")
PRIMITIVES: Mapping[str, Callable[[], object]] = {
    "open": lambda: open("file"),  # noqa: SIM115  # closed with the process, as all here
    ".open": lambda: PATH.open("rb"),
    ".read_text": PATH.read_text,
    ".read_bytes": PATH.read_bytes,
    ".write_text": lambda: PATH.write_text("a"),
    ".write_bytes": lambda: PATH.write_bytes(b"a"),
    ".touch": lambda: Path("other").touch(),
    ".mkdir": lambda: Path("folder").mkdir(),
    ".unlink": PATH.unlink,
    ".rename": lambda: PATH.rename("other"),
    ".replace": lambda: PATH.replace("other"),
    ".rmdir": lambda: Path("inner").rmdir(),
    ".symlink_to": lambda: Path("link").symlink_to("file"),
    ".iterdir": lambda: list(Path("inner").iterdir()),
    ".stat": PATH.stat,
    ".resolve": lambda: PATH.resolve(strict=True),
    "os.open": opened,
    "os.read": with_file(lambda fd: os.read(fd, 4)),
    "os.write": with_file(lambda fd: os.write(fd, b"a")),
    "os.pread": with_file(lambda fd: os.pread(fd, 4, 0)),
    "os.preadv": with_file(lambda fd: os.preadv(fd, [bytearray(4)], 0)),
    "os.pwrite": with_file(lambda fd: os.pwrite(fd, b"a", 0)),
    "os.fsync": with_file(os.fsync),
    "os.ftruncate": with_file(lambda fd: os.ftruncate(fd, 9)),
    "os.truncate": with_file(lambda fd: os.truncate(fd, 9)),
    "os.posix_fallocate": with_file(lambda fd: os.posix_fallocate(fd, 0, 9)),
    "os.replace": lambda: os.replace("file", "other"),
    "os.rename": lambda: os.rename("file", "other"),
    "os.unlink": lambda: os.unlink("file"),
    "os.remove": lambda: os.remove("file"),
    "os.makedirs": lambda: os.makedirs("folder/inner"),
    "os.mkdir": lambda: os.mkdir("folder"),
    "os.scandir": lambda: list(os.scandir("inner")),
    "os.listdir": lambda: os.listdir("inner"),
    "os.stat": lambda: os.stat("file"),
    "os.access": lambda: os.access("file", os.R_OK) or refuse(),
    "os.fork": os.fork,
    "mmap.mmap": with_file(lambda fd: mmap.mmap(fd, 4)),
    "shutil.copy": lambda: shutil.copy("file", "other"),
    "shutil.copyfile": lambda: shutil.copyfile("file", "other"),
    "shutil.copyfileobj": lambda: shutil.copyfileobj(PATH.open("rb"), Path("other").open("wb")),  # noqa: SIM115
    "shutil.copytree": lambda: shutil.copytree("inner", "folder"),
    "shutil.move": lambda: shutil.move("file", "other"),
    "shutil.rmtree": lambda: shutil.rmtree("inner"),
    "tempfile.mkstemp": lambda: tempfile.mkstemp(dir="."),
    "tempfile.mkdtemp": lambda: tempfile.mkdtemp(dir="."),
    "tempfile.TemporaryDirectory": lambda: tempfile.TemporaryDirectory(dir="."),
    "tempfile.NamedTemporaryFile": lambda: tempfile.NamedTemporaryFile(dir="."),  # noqa: SIM115
    "tempfile.TemporaryFile": lambda: tempfile.TemporaryFile(dir="."),  # noqa: SIM115
    "subprocess.run": lambda: subprocess.run(["true"]),
    "subprocess.Popen": lambda: subprocess.Popen(["true"]),
    "threading.Thread": lambda: threading.Thread(target=int).start(),
    "ThreadPoolExecutor": lambda: threading.Thread(target=int).start(),
    "ProcessPoolExecutor": lambda: subprocess.Popen(["true"]),
    "zipfile.ZipFile": lambda: zipfile.ZipFile("other", "w"),
    "torch.empty": lambda: __import__("torch").empty(1 << 16),
    "numpy.empty": lambda: __import__("numpy").empty(1 << 20),
}
HARMLESS: Mapping[str, str] = {
    "os.close": "a descriptor is let go whatever it says",
    "os.closerange": "as close",
    "os.path.": "names; what looks at files there goes through os.stat",
    "os.fspath": "names",
    "os.fsencode": "names",
    "os.fsdecode": "names",
    "os.getcwd": "a name",
    "os.getpid": "a number",
    "os.getppid": "a number",
    "os.getuid": "a number",
    "os.cpu_count": "a number",
    "os.sched_getaffinity": "a number",
    "os.sysconf": "a number",
    "os.strerror": "words",
    "os.environ.": "the environment",
    "os.getenv": "the environment",
    "os.urandom": "numbers of the kernel",
    "os.kill": "a signal",
    "os._exit": "the end",
    "os.fstat": "of a file that is open",
    "os.walk": "looks with os.scandir",
    "os.dup2": "the descriptors of standard streams",
    "os.pipe": "no file",
    "os.set_blocking": "no file",
    "os.get_terminal_size": "no file",
    "os.statvfs": "how much room there is, which is asked for by way of advice",
    "os.isatty": "no file",
    "os.nice": "no file",
    "os.uname": "words",
    "os.getloadavg": "a number",
    "os.posix_fadvise": "advice",
    "shutil.disk_usage": "how much room there is, which is asked for by way of advice",
    "shutil.which": "names",
    "shutil.get_terminal_size": "no file",
    "tempfile.gettempdir": "a name",
    "zipfile.is_zipfile": "looks with open, which is seen",
    "threading.": "but for Thread: locks, events, numbers",
    "mmap.PAGESIZE": "a number",
    "multiprocessing.": "begins processes by subprocess's way or fork, as ProcessPoolExecutor does",
}


def refuse() -> None:
    raise OSError


def seen(words: list[str]) -> int:
    """Which uses succeed where every call fails; the names go into a file.

    Args:
        words: The file of the setting, its root, and the file for names.
    """
    seam = Seam.attached(Path(words[0]), Path(words[1]))
    through = []
    for name, use in PRIMITIVES.items():
        shutil.rmtree("try", ignore_errors=True)
        Path("try/inner").mkdir(parents=True)
        os.chdir("try")
        PATH.write_bytes(b"content")
        Path("inner/one").write_bytes(b"1")
        FILE[:] = [0]
        seam.arm((), "through", least=1 << 14)
        seam.setting.armed = 1
        FILE[:] = [opened()]
        seam.arm(CALLS, "error", errno.EIO, times=FROM_THEN_ON)
        seam.setting.armed = 1
        try:
            use()
        except (OSError, RuntimeError, MemoryError):
            pass
        else:
            through.append(name)
        seam.disarm()
        os.chdir("..")
    Path(words[2]).write_text(json.dumps(through))
    return 0


def mapped(words: list[str]) -> int:
    """The libraries that a process has loaded that has imported everything; into a file."""
    names = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    Path(words[0]).write_text(json.dumps(sorted(names)))
    return 0
