"""Lightning's base classes, and its seeds of workers, from the distribution of Lightning in use.

It is ``pytorch_lightning`` or ``lightning.pytorch``: the one that is imported already; if none is, the one that is
installed; if both are, ``pytorch_lightning``.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

PACKAGES = ("pytorch_lightning", "lightning.pytorch")

_packages = [p for p in PACKAGES if p in sys.modules] or [p for p in PACKAGES if find_spec(p.partition(".")[0])]
if not _packages:
    raise ImportError(
        "the strategies need PyTorch Lightning: pip install pytorch-lightning (or lightning). "
        "TiledModule works without it."
    )

#: The distribution in use.
PACKAGE = _packages[0]

if TYPE_CHECKING or PACKAGE == "pytorch_lightning":
    from lightning_fabric.utilities.seed import pl_worker_init_function
    from pytorch_lightning.callbacks import Callback
    from pytorch_lightning.plugins.io import TorchCheckpointIO
    from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry
else:
    from lightning.fabric.utilities.seed import pl_worker_init_function
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.plugins.io import TorchCheckpointIO
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry

__all__ = [
    "Callback",
    "DDPStrategy",
    "SingleDeviceStrategy",
    "StrategyRegistry",
    "TorchCheckpointIO",
    "pl_worker_init_function",
]
