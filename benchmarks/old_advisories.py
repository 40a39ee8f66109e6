"""The pinned dependencies against the last advisories that are published as a package: `python -m
benchmarks.old_advisories`.

pip-audit (`make audit`) asks a service, which not every network reaches. The package `safety-db` carries advisories
itself, of July 2021: what was known then of a version that is pinned today is found, and nothing that came after.
"""

from __future__ import annotations

import datetime
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from benchmarks.keep import keep

PINS = Path(__file__).resolve().parents[1] / "constraints.txt"
SOURCE = "safety-db==2021.7.17"


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip().lower())


def pinned() -> dict[str, str]:
    """Versions by name."""
    lines = (re.split(r"[#;]", line)[0] for line in PINS.read_text().splitlines())
    pairs = (line.split("==") for line in lines if "==" in line)
    return {plain(name): version.strip().split("+")[0] for name, version in pairs}


def advisories() -> dict[str, Any]:
    """What the package holds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, SOURCE]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            found: dict[str, Any] = json.loads(files.read("safety_db/insecure_full.json"))
    return found


def main() -> None:
    found, pins = advisories(), pinned()
    told = datetime.datetime.fromtimestamp(found.pop("$meta")["timestamp"], datetime.UTC).date()
    known = {plain(name): listed for name, listed in found.items()}
    weaknesses = [
        f"{name} {pins[name]}: {one['id']} ({one['cve']}), {', '.join(one['specs'])}"
        for name in sorted(pins.keys() & known.keys())
        for one in known[name]
        if any(SpecifierSet(specs).contains(Version(pins[name]), prereleases=True) for specs in one["specs"])
    ]
    values = {
        "source": SOURCE,
        "run": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "data of": told.isoformat(),
        "pinned": len(pins),
        "known": len(pins.keys() & known.keys()),
        "weaknesses": weaknesses,
        "limits": "Most pinned versions are younger than these data, so this says little.",
    }
    print(keep("audit", values))


if __name__ == "__main__":
    main()
