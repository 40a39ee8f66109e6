"""The words and numbers of a request, checked."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from wsi_trainer.view.refusals import BadNumber

_WHOLE = re.compile(r"-?[0-9]{1,9}", re.ASCII)
_NUMBER = re.compile(r"-?[0-9]{1,12}(\.[0-9]{1,12})?(e-?[0-9]{1,2})?", re.ASCII)
_SHOWN = 40
"""Letters of a bad word that the error repeats."""


@dataclass(frozen=True)
class Asked:
    """What a request says, in its path and behind the question mark."""

    words: Mapping[str, str]

    def word(self, name: str) -> str:
        """One word, which is not empty."""
        found = self.words.get(name, "")
        if not found:
            raise BadNumber(f"{name} is missing")
        return found

    def whole(self, name: str) -> int:
        """A whole number."""
        found = self.word(name)
        if not _WHOLE.fullmatch(found):
            raise BadNumber(f"{name} is {found[:_SHOWN]!r}; it must be a whole number")
        return int(found)

    def number(self, name: str) -> float:
        """A number."""
        found = self.word(name)
        if not (_NUMBER.fullmatch(found) and math.isfinite(float(found))):
            raise BadNumber(f"{name} is {found[:_SHOWN]!r}; it must be a number")
        return float(found)
