"""Heads that attend over a bag's features, the first of which are repeated to fill a square, or none."""

from __future__ import annotations

import pytest
from torch import nn

from tests.exactness import TOLERANCE, errors
from tests.lightning_plugin.cases import noting
from tests.lightning_plugin.heads import Embedded, TransformerHead, TransMIL


@pytest.mark.parametrize("patches", [25, 23, 17])
@pytest.mark.parametrize(
    "head", [lambda: TransformerHead(12, 8, 2, 2), lambda: TransMIL(12, 8, 2, 4, 5)], ids=["transformer", "TransMIL"]
)
def test_head_is_exact_and_tiled(head: type[nn.Module], patches: int) -> None:
    settings = noting((3,), (4,))
    found = errors(Embedded(3, 4, 12, head()), (patches, 3, 4, 4), settings=settings)
    assert max(found.values()) < TOLERANCE, found
    assert not settings.noted
