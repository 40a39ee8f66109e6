"""Fixtures of the application's tests: how classes are documented is read once, not by every command, and a plan
is searched for once, not by every command that trains or explains a network on images of the same size."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from docstring_parser.attrdoc import AttributeDocstrings

import tests.torchvision_stub  # noqa: F401  # before anything imports timm
from lightning_plugin.planner.cache import VARIABLE


@pytest.fixture(autouse=True, scope="session")
def documented_once() -> Iterator[None]:
    """A parser of the command line reads the source of every class for the help of its fields: most of its time."""
    read = AttributeDocstrings.get_attr_docs

    @cache
    def known(component: type) -> Any:
        return read(AttributeDocstrings(), component)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttributeDocstrings, "get_attr_docs", lambda self, component: known(component))
        yield


@pytest.fixture(autouse=True, scope="session")
def planned_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The engine's own tests search for each plan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(tmp_path_factory.mktemp("plans")))
        yield
