"""Lightning's classes that ours are made of.

They come from the one package of Lightning that is imported already, else from the one that is installed:
``pytorch_lightning`` where both are.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

PACKAGES = ("pytorch_lightning", "lightning.pytorch")

_found = [name for name in PACKAGES if name in sys.modules] or [n for n in PACKAGES if find_spec(n.partition(".")[0])]
if not _found:
    raise ImportError(
        "the strategies need PyTorch Lightning: pip install pytorch-lightning (or lightning). "
        "TiledModule works without it."
    )

if TYPE_CHECKING or _found[0] == "pytorch_lightning":
    from pytorch_lightning.callbacks import Callback
    from pytorch_lightning.plugins.io import TorchCheckpointIO
    from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry
else:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.plugins.io import TorchCheckpointIO
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry

__all__ = ["Callback", "DDPStrategy", "SingleDeviceStrategy", "StrategyRegistry", "TorchCheckpointIO"]
