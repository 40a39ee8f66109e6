"""Which of several processes of a run this one is."""

from __future__ import annotations

from lightning_utilities.core.rank_zero import rank_zero_only


def is_first() -> bool:
    """Whether this process writes: with several devices the others run the same command beside it."""
    return int(getattr(rank_zero_only, "rank", 0)) == 0
