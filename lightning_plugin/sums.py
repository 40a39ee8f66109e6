"""Gradients of a leaf that wait for each other.

[Note: sums] Where several functions of one backward pass give a leaf its gradient (an image that two calls read, a
weight that two networks share), autograd adds the second to the first before the third comes, and the leaf gets the sum
at the end. The sum is made between functions, where no ledger looks; and it is a new tensor, as the first gradient is
one that a ledger has seen, to which autograd does not add in place. So from the second on there is a tensor more than
was counted, until the leaf has it. To the sum, which nobody has seen, the others are added in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from lightning_plugin.passes import current_pass


@dataclass(eq=False)
class Sums:
    """The bytes of sums that wait in the pass under way: by the leaf, 0 where one gradient came so far; and in all."""

    waiting: dict[int, int] = field(default_factory=dict)
    held: int = 0
    began_in: int = -1

    def arrives(self, leaf: Tensor, size: int) -> None:
        """A gradient of a leaf was made."""
        self.forget()
        known = self.waiting.get(id(leaf))
        self.waiting[id(leaf)] = 0 if known is None else size
        self.held += 0 if known is None else size - known

    def taken(self, leaf: Tensor) -> None:
        """A leaf has got its gradient."""
        self.held -= self.waiting.pop(id(leaf), 0)

    def forget(self) -> None:
        """What an earlier pass left is gone with it."""
        if self.began_in != current_pass():
            self.waiting.clear()
            self.held = 0
            self.began_in = current_pass()

    def coming(self, leaves: Iterable[Tensor]) -> int:
        """The bytes of the sums that one more gradient of each leaf will make."""
        self.forget()
        return sum(t.nbytes for t in {id(t): t for t in leaves}.values() if self.waiting.get(id(t)) == 0)
