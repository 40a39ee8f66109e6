"""Dividing slides whose labels do not exclude each other: iterative stratification of whole groups.

Most combinations of labels are too rare to be kept in proportion, but each label by itself can be. The rarest label is
dealt out first, as long as there is a choice, each time to the part that lacks it most (Sechidis and others, 2011).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def divide_marked(groups: Sequence[str], marks: Sequence[Sequence[str]], parts: int, seed: int) -> list[list[int]]:
    """Places of the slides in about equal parts, whole groups, each mark in proportion.

    Args:
        groups: What each slide belongs to and is never parted from.
        marks: The labels that apply to each slide; there may be none.
        parts: How many parts.
        seed: Which of equal choices is taken. The same seed gives the same parts.
    """
    columns = {mark: place for place, mark in enumerate(sorted({mark for some in marks for mark in some}))}
    rows = {group: place for place, group in enumerate(sorted(set(groups)))}
    counts = np.zeros((len(rows), len(columns) + 1))  # slides of each group with each mark; last, all its slides
    for group, some in zip(groups, marks):
        counts[rows[group], [*{columns[mark] for mark in some}, -1]] += 1
    part_of = _deal(counts, parts, np.random.default_rng(seed))
    return [[place for place, group in enumerate(groups) if part_of[rows[group]] == part] for part in range(parts)]


def _deal(counts: np.ndarray, parts: int, rng: np.random.Generator) -> list[int]:
    """The part of each group, by its counts."""
    part_of = np.zeros(len(counts), int)
    lacking = np.tile(counts.sum(0) / parts, (parts, 1))
    left = counts[:, -1] > 0
    tie = rng.permutation(len(counts)) / (1 + len(counts))  # less than a slide: it decides between equals only
    while left.any():
        owners = (counts[left, :-1] > 0).sum(0)  # how many groups can still give each mark
        rarest = int(np.where(owners > 0, owners, np.inf).argmin()) if owners.any() else -1
        # The largest first: small groups can even out later what large ones have spoilt.
        row = int(np.where(left & (counts[:, rarest] > 0), counts[:, rarest] + tie, -1).argmax())
        part = max(range(parts), key=lambda part: (lacking[part, rarest], lacking[part, -1], rng.random()))
        part_of[row], left[row] = part, False
        lacking[part] -= counts[row]
    return [int(part) for part in part_of]
