"""The formats that are fuzzed: how a good file is made, how the project reads it, and what it must say.

A judge shares no code with what it judges: it is the content before the change where a checksum must find the change
(`same`), or another library's word on the changed file (`truth`). Where that library cannot read the changed file
either, a success is counted as one that nobody could judge.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.fuzz import configs, features, plans, requests, slides, stores, words
from tests.fuzz.kinds import Target

TARGETS: Mapping[str, Target] = {
    target.name: target
    for module in (slides, stores, words, configs, features, plans, requests)
    for target in module.TARGETS
}
