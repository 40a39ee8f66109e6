"""A sample of the campaign (`make faults`), the same each time; the seam; and the judge, which must see faults."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.campaign import RECOVERED, RIGHT, Bench, order
from tests.faults.commands import COMMANDS
from tests.faults.engine import WORLDS, rows_of
from tests.faults.judge import difference
from tests.faults.kinds import KINDS
from tests.faults.places import Place
from tests.faults.reached import HARMLESS, PRIMITIVES
from tests.faults.runs import Ended, Server
from tests.faults.seam import CALLS, built, compiler
from tests.test_doors import SOURCES, module_of, nodes

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or compiler() is None, reason="the seam needs Linux and a C compiler"
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Server(Place(tmp_path_factory.mktemp("faults"))) as server:
        yield Bench(server)


#: What CI tries: of some kinds one n in a thousand parts of all calls. The first ones are of defects that were found.
SAMPLE = (
    ("preprocess", "short reads and writes, all", 0),
    ("tissue", "disk full once", 850),
    ("tissue", "SIGKILL", 900),
    ("verify", "no process or thread once", 0),
    ("export", "disk full once", 500),
    ("view --static", "SIGKILL", 700),
    ("status", "EIO once", 300),
    ("embed", "disk full from then on", 600),
    ("fit", "SIGKILL", 950),
    ("predict", "too many open files from then on", 400),
)


@pytest.mark.parametrize(("command", "kind", "part"), SAMPLE)
def test_a_sample_survives(bench: Bench, command: str, kind: str, part: int) -> None:
    calls = len(bench.sites(command, KINDS[kind]))
    outcome = bench.try_one(command, kind, 1 + part * (calls - 1) // 1000)
    assert outcome.verdict in (RIGHT, RECOVERED), outcome


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", COMMANDS)
def test_more_of_them(bench: Bench, command: str, kind: str) -> None:
    for n in order(command, kind, bench.sites(command, KINDS[kind]))[:3]:
        outcome = bench.try_one(command, kind, n)
        assert outcome.verdict != "defect", (n, outcome)


STEPS = ["a step, maps on the disk", *(pytest.param(name, marks=pytest.mark.full) for name in WORLDS)]


@pytest.mark.parametrize("world", STEPS)
def test_steps_of_the_engine(bench: Bench, world: str, count: Callable[..., int]) -> None:
    rows = rows_of(bench.server, world, count(ci=1, full=60))
    assert not [row for row in rows if row["defects"]]
    assert sum(row["recovered"] for row in rows) > 3 and sum(row["right"] for row in rows) > 1


# -- the seam


def test_the_seam_sees_what_python_has(bench: Bench, tmp_path: Path) -> None:
    server, out = bench.server, tmp_path / "through.json"
    server.place.begin()
    words = [str(server.seam.file), str(server.place.now), str(out)]
    ended = server.run(words, "tests.faults.reached:seen")
    assert ended.code == 0, ended.said
    assert json.loads(out.read_text()) == []


def uses() -> Iterator[tuple[str, str]]:
    """Every call of the project's of a function that may reach the system, as the table has its name."""
    modules = {"os", "shutil", "mmap", "tempfile", "subprocess", "threading", "multiprocessing", "zipfile"}
    bare = {name.rpartition(".")[2] for name in PRIMITIVES if "." in name[1:]} | {"open"}
    methods = {name for name in PRIMITIVES if name.startswith(".")}
    for path in SOURCES:
        own = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in nodes(path)
            if isinstance(node, ast.ImportFrom) and node.module in modules
            for alias in node.names
        }
        for node in nodes(path):
            if not isinstance(node, ast.Call):
                continue
            if not isinstance(node.func, ast.Name | ast.Attribute):
                continue
            plain = isinstance(node.func, ast.Name) or isinstance(node.func.value, ast.Name | ast.Attribute)
            written = own.get(ast.unparse(node.func), ast.unparse(node.func)) if plain else ""
            head = written.partition(".")[0]
            if (head in modules and "." in written) or (written in bare and written in PRIMITIVES):
                yield module_of(path), written
            elif isinstance(node.func, ast.Attribute) and f".{node.func.attr}" in methods:
                yield module_of(path), f".{node.func.attr}"


def test_the_project_calls_nothing_that_the_seam_does_not_know() -> None:
    begins = tuple(name for name in HARMLESS if name.endswith("."))
    found = set(uses())
    unknown = {use for use in found if use[1] not in {*PRIMITIVES, *HARMLESS} and not use[1].startswith(begins)}
    assert not unknown, "give each a line in tests/faults/reached.py"
    assert {"os.replace", "os.pread", ".write_bytes", "mmap.mmap"} <= {name for _, name in found}


#: Functions of the C library that open, read, write, change or lock files, map memory or start processes.
OF_THE_LIBRARY = re.compile(
    r"^(_*f?open(64)?(_2)?|openat(64)?|creat(64)?|f?re?open(64)?|mkstemps?(64)?|tmpfile(64)?|read|p?readv?(64)?(v2)?|"
    r"write|pwritev?(64)?(v2)?|writev|fread|fwrite|sendfile(64)?|copy_file_range|splice|rename(at2?)?|unlink(at)?|"
    r"mkdir(at)?|rmdir|(sym)?link(at)?|f?truncate(64)?|(posix_)?fallocate(64)?|fd?atasync|fsync|flock|lockf(64)?|"
    r"mmap(64)?|mremap|v?fork|execv[ep]*|posix_spawnp?|clone|system|popen|pthread_create|io_uring_\w+|aio_\w+)$"
)
PASSED: dict[str, str] = {
    "mremap": "grows what was mapped; no file is mapped so",
    "tmpfile": "no file of the project: libraries keep notes there",
    "tmpfile64": "as tmpfile",
    "freopen": "standard streams",
    "freopen64": "standard streams",
    "clone": "of libraries that nobody calls here",
    "system": "of libraries, to which no command is given here",
    "popen": "of libraries, to which no command is given here",
    "execv": "after fork or vfork, which are seen",
    "execvp": "after fork or vfork, which are seen",
    "posix_spawnp": "of libraries that nobody calls here",
    "splice": "between pipes",
    "lockf": "by Python's fcntl.lockf, which nobody calls here",
    "lockf64": "as lockf",
    "__fread_chk": "of checked builds",
}


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_the_seam_has_every_function_that_the_libraries_call(bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "mapped.json"
    assert bench.server.run([str(out)], "tests.faults.reached:mapped").code == 0
    files = [name for name in json.loads(out.read_text()) if ".so" in Path(name).name or "python" in Path(name).name]
    system = re.compile(r"/(libc|ld-linux[\w-]*|libpthread|libdl|libm|librt|wsi-test-seam[\w-]*)[.-]")
    others = [name for name in files if Path(name).is_file() and not system.search(name)]
    asked = symbols("-u", others)
    here = symbols("--defined-only", [str(built())])
    missing = {name for name in asked if OF_THE_LIBRARY.match(name)} - here - PASSED.keys()
    assert not missing, "the seam does not see these: write them in tests/faults/seam.c, or say why in PASSED"
    assert {"pread64", "fopen64", "posix_memalign"} & asked, "or this test sees nothing"


def symbols(which: str, files: list[str]) -> set[str]:
    found = subprocess.run(["nm", "-D", which, *files], capture_output=True, text=True, check=False).stdout
    return {line.split()[-1].partition("@")[0] for line in found.splitlines() if line and not line.endswith(":")}


# -- the judge


def test_the_judge_sees_what_is_wrong() -> None:
    right = {"out/a": "1", "run/log.txt": "any"}
    assert not difference(right, dict(right))
    assert "another" in difference(right, {**right, "out/a": "2"})
    assert "missing" in difference(right, {"run/log.txt": "any"})
    assert "is there" in difference(right, {**right, "out/b": "1"})
    for name in ("tmp/x", "out/a.part", "out/.a.partial", "out/.staging/a.journal"):
        assert "left over" in difference(right, {**right, name: "1"})


@pytest.mark.parametrize(
    ("code", "said", "left", "wrong"),
    [
        (None, "", False, "hangs"),
        (0, "", True, "left behind"),
        (1, "Traceback (most recent call last):\n  ...\nOSError", False, "traceback"),
        (0, "Traceback (most recent call last):\n  ...\nOSError", False, "traceback"),
        (-11, "", False, "signal 11"),
        (70, "wsi-train: error: KeyError: 3 (x.py, line 1). This is a fault of wsi-train", False, "one of its own"),
        (2, "", False, "without a message"),
        (2, "wsi-train: error: something", False, "neither"),
        (2, "wsi-train: error: Input/output error", False, ""),
        (0, "", False, ""),
    ],
)
def test_the_judge_sees_unclear_ends(bench: Bench, code: int | None, said: str, left: bool, wrong: str) -> None:
    found = bench.unclear(Ended(code, left, said), KINDS["EIO once"])
    assert (wrong in found) if wrong else not found


def test_every_call_is_of_some_kind() -> None:
    assert {call for kind in KINDS.values() for call in kind.calls} == set(CALLS)
