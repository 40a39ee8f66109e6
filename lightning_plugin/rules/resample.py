"""Where the rules of other families find those of resampling: transposed convolution, adaptive pooling."""

from lightning_plugin.rules.adaptive import adaptive_max
from lightning_plugin.rules.transposed import transposed

__all__ = ["adaptive_max", "transposed"]
