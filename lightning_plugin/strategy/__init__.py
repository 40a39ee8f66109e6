"""Lightning strategies: the engine under any `Trainer`.

Nothing here imports Lightning until it is imported by somebody else or a strategy is asked for; see
`registration`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any


def flavour() -> Any:
    """The module with the strategies for the Lightning in use; ``pytorch_lightning`` where both are."""
    names = ("pytorch_lightning", "lightning.pytorch")
    present = [n for n in names if n in sys.modules] or [n for n in names if importlib.util.find_spec(n.split(".")[0])]
    if not present:
        raise ImportError(
            "the strategies need PyTorch Lightning: pip install pytorch-lightning (or lightning). "
            "TiledModule works without it."
        )
    suffix = "pytorch_lightning" if present[0] == "pytorch_lightning" else "lightning"
    return importlib.import_module(f"lightning_plugin.strategy.flavour_{suffix}")
