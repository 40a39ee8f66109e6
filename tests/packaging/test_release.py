"""Nothing is published before it was tested, installed and compared with its tag; tools of a commit are those of CI."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import wsi_trainer

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"
PACKAGE = '"""About."""\n\n__version__ = "1.2.0"\n'
CHANGELOG = "# Changelog\n\n## 1.2.0 (2027-01-31)\n\n### Fixed\n\n- A fault.\n\n## 1.1.0 (2026-12-31)\n\n- A thing.\n"


def release() -> Any:
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_notes_are_the_section_of_the_version() -> None:
    assert release().notes("v1.2.0", PACKAGE, CHANGELOG) == "### Fixed\n\n- A fault.\n"


@pytest.mark.parametrize(
    ("tag", "changelog", "message"),
    [
        ("v1.3.0", CHANGELOG, "the tag is v1.3.0 and the version of wsi_trainer/__init__.py is 1.2.0"),
        ("1.2.0", CHANGELOG, "the tag is 1.2.0"),
        ("v1.2.0", CHANGELOG.replace("1.2.0", "1.2.1"), "no section with the heading 1.2.0"),
        ("v1.2.0", CHANGELOG.replace(" (2027-01-31)", ""), "no section with the heading 1.2.0"),
        ("v1.2.0", CHANGELOG.replace("## 1.2", "## Unreleased\n\n- Another.\n\n## 1.2"), "still has lines"),
    ],
)
def test_what_does_not_go_together_is_not_released(tag: str, changelog: str, message: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(message)):
        release().notes(tag, PACKAGE, changelog)


def test_the_script_reads_this_repository() -> None:
    package = (ROOT / "wsi_trainer" / "__init__.py").read_text()
    log = re.sub(r"^## Unreleased.*?(?=^## )", "", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    assert release().notes(f"v{wsi_trainer.__version__}", package, log)


def test_what_is_published_was_tested_and_installed() -> None:
    jobs = yaml.safe_load((WORKFLOWS / "release.yml").read_text())["jobs"]
    assert set(jobs["publish"]["needs"]) == {"test", "build", "install"}
    assert jobs["test"]["uses"] == "./.github/workflows/ci.yml"
    assert "workflow_call" in yaml.safe_load((WORKFLOWS / "ci.yml").read_text())[True]  # YAML reads `on` as true
    runs = {name: " ".join(step.get("run", "") for step in job.get("steps", [])) for name, job in jobs.items()}
    assert ".ci/release.py" in runs["build"]
    installed, checked = runs["install"].index("dist/*.whl"), runs["install"].index("wsi-train doctor")
    assert installed < checked < runs["install"].index("sbom.json")
    assert "files/parts/*" in runs["page"]


@pytest.mark.parametrize("tool", ["ruff", "mypy"])
def test_a_commit_is_checked_by_the_locked_version(tool: str) -> None:
    hooks = {
        hook["repo"].rpartition("/")[2]: hook
        for hook in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    }
    (locked,) = re.findall(rf"^{tool}==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    (rev,) = {hook["rev"] for name, hook in hooks.items() if tool in name}
    assert rev == f"v{locked}"
