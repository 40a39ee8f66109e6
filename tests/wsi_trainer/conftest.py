"""The application's tests run many commands: how classes are documented is read once, and a plan searched for once."""

import pytest

import tests.torchvision_stub  # noqa: F401  # before anything imports timm


@pytest.fixture(autouse=True, scope="session")
def quick_commands(documented_once: None, planned_once: None) -> None:
    """The engine's own tests search for each plan."""
