"""What a plan leaves free of a budget: the last bytes of a step are known to nobody beforehand."""

from __future__ import annotations

import math

#: This part of a budget is left free: a step's last bytes depend on rounding in places that a rehearsal skips.
SPARE = 0.01
#: And this many bytes: single numbers that the user's own code holds beside the network, such as losses.
RESERVE = 1024


def usable(budget: int) -> int:
    """How much of a budget a plan may use."""
    return int(budget * (1 - SPARE)) - RESERVE


def budget_for(peak: int) -> int:
    """The smallest budget of which so much may be used."""
    return math.ceil((peak + RESERVE) / (1 - SPARE)) + 1
