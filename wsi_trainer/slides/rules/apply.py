"""A mask after all rules that were asked for."""

from __future__ import annotations

from dataclasses import replace

from wsi_trainer.slides.rules.choice import Rules
from wsi_trainer.slides.rules.look import Look
from wsi_trainer.slides.tissue import Mask, TissueMask, is_dark, without_dust


def apply_rules(rules: Rules, tissue: TissueMask, look: Look) -> TissueMask:
    """The mask with what rules add and without what they take out.

    Each rule looks at what those before it have left, so that nothing is counted twice. Crumbs that a rule leaves go
    with what it took.

    Args:
        rules: Which ones.
        tissue: The mask so far.
        look: The slide; its mask is not looked at.
    """
    mask = tissue.mask
    found: dict[str, Mask] = {}
    dark = is_dark(look.pixels)
    for row, rule in rules.rows():
        if dark and not row.on_dark:
            continue
        here = rule.find(replace(look, mask=mask))
        if row.adds:
            found[row.name] = here & ~mask
            mask = mask | here
        elif here.any():
            left = without_dust(mask & ~here)
            found[row.name] = mask & ~left
            mask = left
        else:
            found[row.name] = here
    return replace(tissue, mask=mask, found=found)
