"""What all tests share: how much is run, where real slides are, and where a result is recorded.

`pytest` runs sampled counts and is what CI runs. `pytest --full` (or `make test-full`) runs the counts that
the project promises: tests marked `full` too, `count(...)` in full, and the hypothesis profile `full`.
"""

import gc
import json
import math
import os
import platform
import random
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.operator_coverage import OperatorCoverage

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

hypothesis.settings.register_profile("ci", max_examples=10, deadline=None, derandomize=True)
hypothesis.settings.register_profile("full", max_examples=500, deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the stated counts, not a sample of them")
    parser.addoption("--minutes", type=float, default=math.inf, help="each state machine goes on for at most so long")
    parser.addoption(
        "--operators", action="store_true", help="note which tests reach which rule, for the table of operators"
    )
    parser.addoption("--draw", type=int, help="the slow tests that another run drew: its first lines have the number")
    parser.addoption("--device", help="where the tensors of the engine's tests are: cuda")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "full: runs only with --full, because it takes long")
    config.addinivalue_line("markers", "slow: takes seconds; a third of these run, drawn anew, unless named or --full")
    if config.getoption("draw") is None:  # workers are given the number of the process that started them
        config.option.draw = random.SystemRandom().randrange(1000)
    # Plans of tests are searched for, with the built-in rates, also on a machine that was calibrated.
    os.environ["LIGHTNING_PLUGIN_CACHE"] = ""
    hypothesis.settings.load_profile("full" if config.getoption("--full") else "ci")
    if config.getoption("--device"):
        from tests.on_device import enter

        enter(config.getoption("--device"))
    if config.getoption("--operators"):
        config.pluginmanager.register(OperatorCoverage(RESULTS / "operators.json"))


def pytest_report_header(config: pytest.Config) -> str:
    return f"slow tests: a third of them, --draw {config.getoption('draw')}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    full, draw = config.getoption("--full"), config.getoption("draw")
    named = any("::" in word for word in config.args)
    for item in items:
        if item.get_closest_marker("full") and not full:
            item.add_marker(pytest.mark.skip(reason="runs with --full"))
        if item.get_closest_marker("slow") and not (full or named) and (zlib.crc32(item.nodeid.encode()) + draw) % 3:
            item.add_marker(pytest.mark.skip(reason="slow, and of another draw"))
        reason = elsewhere(item.nodeid) if config.getoption("--device") else None
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("gpu") and not has_cuda():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed PyTorch by the test's name: contents do not depend on the order of tests. Property tests draw their own."""
    import torch

    torch.manual_seed(zlib.crc32(item.nodeid.encode()))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported stays: the garbage collector need not look at a million objects whenever a test asks it to."""
    gc.collect()
    gc.freeze()


def elsewhere(test: str) -> str | None:
    """Why a test does not move to another device."""
    from tests.on_device import ELSEWHERE

    return next((reason for part, reason in ELSEWHERE.items() if part in test), None)


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def count(request: pytest.FixtureRequest) -> Callable[..., int]:
    """How many cases to run: `for seed in range(count(ci=20, full=500))`."""
    full_run = bool(request.config.getoption("--full"))

    def choose(*, ci: int, full: int) -> int:
        return full if full_run else ci

    return choose


@pytest.fixture(scope="session")
def minutes(request: pytest.FixtureRequest) -> float:
    """How long a state machine goes on: it ends with fewer sequences than are asked for, and says how many."""
    return float(request.config.getoption("--minutes"))


@pytest.fixture(scope="session")
def record_result(request: pytest.FixtureRequest) -> Callable[[str, dict[str, Any]], None]:
    """Keep what a full run measured: `record_result("kill_and_rerun", {"kills": 100, "identical": 100})`.

    Written to `benchmarks/results/NAME.json` with the versions it was measured with; a sampled run writes
    nothing.
    """
    full_run = bool(request.config.getoption("--full"))

    def write(name: str, values: dict[str, Any]) -> None:
        if not full_run:
            return
        RESULTS.mkdir(parents=True, exist_ok=True)
        record = {"name": name, "environment": environment(), "values": values}
        (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")

    return write


def environment() -> dict[str, str]:
    import torch

    return {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}


@pytest.fixture(scope="session")
def documented_once() -> Iterator[None]:
    """A parser of the command line reads the source of every class for the help of its fields: most of its time."""
    from docstring_parser.attrdoc import AttributeDocstrings

    read = AttributeDocstrings.get_attr_docs

    @cache
    def known(component: type) -> Any:
        return read(AttributeDocstrings(), component)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttributeDocstrings, "get_attr_docs", lambda self, component: known(component))
        yield


@pytest.fixture(scope="session")
def planned_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A plan is searched for once, not by every command that runs a network on images of the same size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_PLUGIN_CACHE", str(tmp_path_factory.mktemp("plans")))
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with real slides and label tables: it lies beside the repository, if at all."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real slides: {folder} does not exist")
    return folder
