"""The snippet that every visitor reads runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).resolve().parents[1] / "README.md"


@pytest.fixture
def snippet() -> str:
    found = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(found) == 1, "one snippet is enough for a README"
    return found[0]


def test_the_snippet_trains(snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # Lightning writes its logs where it is run
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "readme"}
    exec(compile(snippet, str(README), "exec"), names)
    trainer = names["trainer"]
    assert trainer.global_step == 1  # type: ignore[attr-defined]
    gradients = [p.grad for p in trainer.lightning_module.parameters()]  # type: ignore[attr-defined]
    assert all(g is not None and g.isfinite().all() and g.any() for g in gradients if g.dim() > 1)
