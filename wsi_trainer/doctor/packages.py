"""Which packages are installed, and which extras would add the rest."""

import platform
import re
from importlib import metadata

from wsi_trainer.doctor.check import Check, Status

DISTRIBUTION = "wsi-trainer"
TOOL_EXTRAS = ("dev", "docs")
REQUIREMENT = re.compile(
    r"^(?P<name>[A-Za-z0-9._-]+)(?:\[[^]]*\])?(?P<versions>[^;]*)(?:;.*extra\s*==\s*['\"](?P<extra>[^'\"]+)['\"])?"
)


def check_packages() -> list[Check]:
    """A check for Python, one for each required package, and one for each optional extra."""
    required, extras = declared()
    python = Check("packages", "python", Status.OK, f"{platform.python_version()} on {platform.platform()}")
    needed = [check_required(name) for name in required]
    optional = [check_extra(extra, names) for extra, names in extras.items()]
    return [python, *needed, *optional]


def declared() -> tuple[list[str], dict[str, list[str]]]:
    """The required packages and those of each extra, as the installed distribution declares them."""
    required: list[str] = []
    extras: dict[str, list[str]] = {}
    for line in metadata.requires(DISTRIBUTION) or []:
        found = REQUIREMENT.match(line)
        if found is None or found["name"] == DISTRIBUTION:
            continue
        if found["extra"] is None:
            required.append(found["name"])
        elif found["extra"] not in TOOL_EXTRAS:
            extras.setdefault(found["extra"], []).append(found["name"])
    return required, extras


def version_of(name: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_required(name: str) -> Check:
    """A package that the application cannot do without."""
    version = version_of(name)
    if version is None:
        return Check("packages", name, Status.FAILED, "not installed", f"pip install {name}")
    return Check("packages", name, Status.OK, version)


def check_extra(extra: str, names: list[str]) -> Check:
    """An optional extra: all of its packages, or what is missing and the command that adds it."""
    versions = {name: version_of(name) for name in names}
    listed = ", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items())
    if all(versions.values()):
        return Check("extras", extra, Status.OK, listed)
    return Check("extras", extra, Status.ABSENT, listed, f"pip install '{DISTRIBUTION}[{extra}]'")
