"""Every message on the pages on troubleshooting is one that the code can say."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "docs" / "how-to" / name for name in ("troubleshooting.md", "troubleshooting-inputs.md")]
ROWS = [row for page in PAGES for row in re.findall(r"^\| `(.+?)` \|", page.read_text(encoding="utf-8"), re.MULTILINE)]


@pytest.fixture(scope="module")
def said() -> str:
    """All texts in the code, what is filled in left out."""
    texts = []
    for package in ("wsi_trainer", "lightning_plugin"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = (v.value if isinstance(v, ast.Constant) else "..." for v in node.values)
                    texts.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
    return re.sub(r"[`'\s]+", " ", "\n".join(texts))


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_the_code_says_it(row: str, said: str) -> None:
    fragments = [re.sub(r"[`'\s]+", " ", part).strip() for part in re.split(r"'?\.\.\.'?", row)]
    assert any(len(fragment) > 8 for fragment in fragments), "a row needs words to be found by"
    assert [fragment for fragment in fragments if fragment not in said] == []
