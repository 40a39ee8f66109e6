"""Which class a drawn region means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wsi_trainer.regions.region import Region, RegionsError

IGNORED = 255
"""The value of a pixel that says nothing: no loss looks at it. A slide that is shifted has it where glass comes in."""
IGNORE = "ignore"
"""What a region or an unmarked pixel is that says nothing."""


@dataclass(frozen=True)
class Legend:
    """Names in annotation files, and the classes they stand for.

    Attributes:
        classes: The classes; a pixel's value is the place of its class.
        drawn: From the name in a file to a class or `ignore`, in the order of painting: what comes later lies on top.
        unmarked: What a pixel is on which nothing is drawn: a class, or `ignore`.
    """

    classes: tuple[str, ...]
    drawn: Mapping[str, str] = field(default_factory=dict)
    unmarked: str = ""

    @staticmethod
    def of(classes: Sequence[str], drawn: Mapping[str, str] | None, unmarked: str | None) -> Legend:
        """The legend with its defaults: each class by its own name, and unmarked is the first."""
        legend = Legend(tuple(classes), dict(drawn or {name: name for name in classes}), unmarked or classes[0])
        for key, meant in (*legend.drawn.items(), ("unmarked", legend.unmarked)):
            if meant not in (*classes, IGNORE):
                raise ValueError(f"{key!r} is said to be {meant!r}, which is none of {', '.join(classes)} and {IGNORE}")
        return legend

    def value(self, meant: str) -> int:
        """The value of a pixel of a class, or of `ignore`."""
        return IGNORED if meant == IGNORE else self.classes.index(meant)

    @property
    def ground(self) -> int:
        """The value of a pixel on which nothing is drawn."""
        return self.value(self.unmarked)

    def painted(self, regions: Sequence[Region], path: Path) -> list[tuple[Region, int]]:
        """The regions from the lowest to the topmost, each with the value of its pixels."""
        order = {name: place for place, name in enumerate(self.drawn)}
        for region in regions:
            if region.name not in order:
                raise RegionsError(path, self._unknown(region.name))
        return [
            (region, self.ground if region.removes else self.value(self.drawn[region.name]))
            for region in sorted(regions, key=lambda region: order[region.name])
        ]

    def _unknown(self, name: str) -> str:
        which = f"a region of the class {name!r}" if name else "a region without a class"
        return (
            f"has {which}; the task knows {', '.join(map(repr, self.drawn))}. Say in model.task.init_args.drawn which "
            f"class it is, such as {{{name or repr('')}: {self.classes[-1]}}}, or {IGNORE}"
        )
