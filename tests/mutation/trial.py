"""One mutant against tests, in a process that is forked from one which has everything but the engine imported."""

from __future__ import annotations

import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from types import CodeType, ModuleType
from typing import Any

import hypothesis
import pytest

from tests.mutation.places import ENGINE, ROOT
from tests.mutation.tests import Test

#: What the engine's tests import of others.
PRELOADED = ("torch", "numpy", "torch._dynamo", "torch._subclasses.fake_tensor")
#: A test may take so many times as long as it took, and so many seconds more: whoever takes longer hangs.
TIMES, MORE = 10, 30
#: A process may have so much memory, and write files so large: a mutant may ask for anything.
MEMORY, FILE = 16 << 30, 4 << 30


def preload() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    assert not [name for name in sys.modules if name.partition(".")[0] == ENGINE], "the engine is imported in each fork"
    gc.collect()
    gc.freeze()


class Changed(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Has one module imported from another source than its file's."""

    def __init__(self, file: str, source: str) -> None:
        name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        super().__init__(name, str(ROOT / file))
        self.source = source

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.source, self.path, "exec")


class Reporter:
    """A pytest plugin: runs the chosen tests in their order, and says which began and which failed."""

    def __init__(self, tests: Sequence[Test], pipe: Connection) -> None:
        self.places = {test.name: place for place, test in enumerate(tests)}
        self.pipe = pipe

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        """A test that fails need not find its smallest example."""
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile("mutants", hypothesis.settings.default, phases=phases)
        hypothesis.settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self.places), key=lambda item: self.places[item.nodeid]
        )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.pipe.send(("began", nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.pipe.send(("failed", report.nodeid))


def _child(change: tuple[str, str] | None, tests: Sequence[Test], pipe: Connection, folder: str) -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE, FILE))
    with open(os.devnull, "r+b") as nothing:
        for stream in (0, 1, 2):
            os.dup2(nothing.fileno(), stream)
    os.chdir(ROOT)
    if change is not None:
        sys.meta_path.insert(0, Changed(*change))
    files = list(dict.fromkeys(test.name.partition("::")[0] for test in tests))
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    options = ["-x", "--tb=no", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--basetemp", f"{folder}/tests"]
    code = int(pytest.main([*options, *files], [Reporter(tests, pipe)]))
    pipe.send(("ended", code))
    os._exit(0)


def attempt(change: tuple[str, str] | None, tests: Sequence[Test]) -> tuple[str, str]:
    """What became of the tests: `survived`, `killed` or `timeout`, and the test that said so."""
    if not tests:
        return "survived", ""
    seconds = {test.name: test.seconds for test in tests}
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = context.Process(target=_child, args=(change, tests, theirs, folder))
        process.start()
        theirs.close()
        current = "importing"
        try:
            while ours.poll(MORE + TIMES * seconds.get(current, 5.0)):
                what, said = ours.recv()
                if what == "failed":
                    return "killed", said
                if what == "ended":
                    return ("survived", "") if said == 0 else ("killed", "importing")
                current = said
            return "timeout", current
        except EOFError:
            return "killed", current  # the process died
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
            ours.close()
