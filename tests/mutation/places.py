"""Where things are."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENGINE = "lightning_plugin"
STATE = ROOT / ".mutants"

#: What is changed: the operators, what decides, and what both count in.
PARTS = ("rules/*.py", "planner/**/*.py", "program/*.py", "boxes.py", "layout.py")


def changed_files() -> list[str]:
    """The files that are changed, as they are called from the root."""
    return sorted(str(path.relative_to(ROOT)) for part in PARTS for path in (ROOT / ENGINE).glob(part))
