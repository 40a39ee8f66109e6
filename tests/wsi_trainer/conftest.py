"""What the tests of the application share: how classes are documented is read once, not by every command."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from docstring_parser.attrdoc import AttributeDocstrings

import tests.torchvision_stub  # noqa: F401  # before anything imports timm


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
