"""The code on pages that teach the engine runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

PAGES = Path(__file__).resolve().parents[1] / "docs" / "how-to"


def test_the_page_on_rules_adds_one() -> None:
    page = PAGES / "add-a-rule.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {"__name__": __name__}  # dataclasses look their module up
    exec(compile("\n".join(blocks), str(page), "exec", dont_inherit=True), names)
    result = names["result"]
    assert result.exact, result  # type: ignore[attr-defined]
    assert not result.barriers, "the rule that the page adds was not used"  # type: ignore[attr-defined]
