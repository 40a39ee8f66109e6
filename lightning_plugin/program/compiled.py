"""Tapes that are compiled.

[Note: compiled] A tape is a function of tensors, and the tiles of a kind run it again and again. Where the user says
so, a tape that has run often in a direction is traced (into PyTorch's own operators, on tensors without data) and given
to `torch.compile`: once a kind and direction, kept with its findings. What a step does beside stays as it is: tiles are
read, gradients given and maps written by the same code, and the first tile of each kind in a pass runs by its tape, so
that a ledger sees its operators. It sees nothing within a compiled tile but what comes out.
Operators whose results nobody reads are left out, and run after it on what comes out: see [Note: unread] in
`rules.unread`.

A tape is not compiled, and it is said why, where an operator minds where a tile lies (random numbers), where tiles hand
rows on, where a result is looked for by its very bits (a compiled tile may round otherwise in forward than in
backward), where findings do not last until the next step, and where PyTorch cannot trace or compile it. Then tiles run
as without a compiler, and so do those that read keys in pieces.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_plugin.boxes import Box
from lightning_plugin.ledger import Ledger, unwatched
from lightning_plugin.ops import ReduceOp
from lightning_plugin.options import Compile
from lightning_plugin.program.program import Program
from lightning_plugin.program.tape import Emit, Step, Tape

#: Tiles of a kind that run by their tape before it is compiled: compiling takes as long as some hundreds of small ones.
OFTEN = 32
#: Options of `torch.compile`. A tape's tensors have the sizes of its kind, and PyTorch's own guards look before
#: each call whether they do: that every kernel looks again takes as long as some kernels do.
ASKED: dict[Compile, dict[str, Any]] = {
    "tiles": {"size_asserts": False},
    "graphs": {"size_asserts": False, "triton.cudagraphs": True},
}

Function = Callable[[list[Tensor], list[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class Compiled:
    """A tape as one function: it gives what the tape emits, so many tensors for each target; of the targets that are
    ``unread``, what their operators read."""

    function: Function
    emits: tuple[tuple[int, int], ...]
    unread: Mapping[int, Step]

    def give(self, outputs: Sequence[Tensor], vectors: Sequence[Tensor], owned: Sequence[Any], emit: Emit) -> None:
        """Hand what a tile has made to whom the tape would."""
        rest = iter(outputs)
        for target, count in self.emits:
            made = [next(rest) for _ in range(count)]
            if target in self.unread:
                with torch.enable_grad():
                    made = [self.unread[target].without_result(made, vectors)]
            emit(target, owned[target], made)


@dataclass(eq=False)
class CompiledTapes:
    """The compiled tapes of a program on a grid, by the kind of their tiles and whether they run with grad.

    Attributes:
        runs: The number of runs of each kind's tape, until it is compiled.
        made: The compiled tapes; None for one that cannot be compiled.
    """

    runs: Counter[tuple[Hashable, bool]] = field(default_factory=Counter)
    made: dict[tuple[Hashable, bool], Compiled | None] = field(default_factory=dict)


@dataclass(eq=False)
class Compiler:
    """Compiles the tapes of a module's steps; ``backend`` is `torch.compile`'s, ``refused`` what it was told no."""

    how: Compile
    backend: str = "inductor"
    refused: set[str] = field(default_factory=set)

    def run(
        self,
        known: CompiledTapes,
        kind: Hashable,
        tape: Tape,
        program: Program,
        tiles: list[Any],
        vectors: Sequence[Any],
        grad: bool,
        ledger: Ledger | None,
    ) -> Callable[[Sequence[Box], Emit], None] | None:
        """Run a compiled tape on what a tile begins with, and empty that list: its results, to be handed on, or None
        where the tape is not compiled yet."""
        known.runs[kind, grad] += 1
        if known.runs[kind, grad] < OFTEN or not all(isinstance(tile, Tensor) for tile in tiles):
            return None
        with unwatched(ledger):
            if (kind, grad) not in known.made:
                known.made[kind, grad] = self.make(tape, program, tiles, vectors, grad)
            compiled = known.made[kind, grad]
            if compiled is None:
                return None
            outputs = self.call(compiled, tiles, vectors, grad)
        tiles.clear()
        if ledger is not None:
            for tensor in outputs:
                ledger.count(tensor)
        return partial(compiled.give, outputs, vectors)

    def make(
        self, tape: Tape, program: Program, tiles: list[Tensor], vectors: Sequence[Tensor], grad: bool
    ) -> Compiled | None:
        """A tape compiled for tensors like these, and tried on them; None where it cannot be."""
        try:
            made = self.compiled(tape, program, tiles, vectors, grad)
            self.try_out(made, tiles, vectors, grad)
        except Exception as error:  # whatever PyTorch raises: the tape computes the same, or raises it again
            self.refuse(program, f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}")
            return None
        return made

    def takes(self, program: Program, scans: bool, lasting: bool) -> bool:
        """True of a program whose tapes may be compiled; ``scans``: its tiles hand rows on; ``lasting``: the next step
        runs by the same tapes."""
        reason = "its tiles hand rows on" if scans else why_not(program)
        if reason is None and not lasting:
            reason = "what they compute may be something else in the next step"
        if reason is not None:
            self.refuse(program, reason)
        return reason is None

    def refuse(self, program: Program, reason: str) -> None:
        """Say once why tiles are not compiled."""
        if reason not in self.refused:
            self.refused.add(reason)
            names = f"{program.steps[0].label} … {program.steps[-1].label}"
            warnings.warn(f"the tiles of {names} are not compiled, and run as without it: {reason}", stacklevel=2)

    def compiled(
        self, tape: Tape, program: Program, tiles: list[Tensor], vectors: Sequence[Tensor], grad: bool
    ) -> Compiled:
        """A tape traced, and handed to PyTorch's compiler, which waits for the first call."""
        emits: list[tuple[int, int]] = []
        tape, unread = tape.parted() if grad else (tape, {})

        def function(tiles: list[Tensor], vectors: Sequence[Tensor]) -> list[Tensor]:
            outputs: list[Tensor] = []
            emits.clear()

            def emit(target: int, _: Any, made: Sequence[Tensor]) -> None:
                emits.append((target, len(made)))
                outputs.extend(made)

            tape.run([*tiles], range(len(program.targets)), vectors, emit, grad)
            return outputs

        blank = [[t.detach().requires_grad_(t.requires_grad) for t in given] for given in (tiles, vectors)]
        with torch.set_grad_enabled(grad):
            traced = make_fx(function, tracing_mode="fake", pre_dispatch=True)(*blank)
        asked = ASKED[self.how] if self.backend == "inductor" else None
        return Compiled(torch.compile(traced, backend=self.backend, options=asked, dynamic=False), tuple(emits), unread)

    def call(self, compiled: Compiled, tiles: list[Tensor], vectors: Sequence[Tensor], grad: bool) -> Sequence[Tensor]:
        """Run a compiled tape on a tile."""
        if self.how == "graphs":
            torch.compiler.cudagraph_mark_step_begin()  # nothing is left of the tile before
        with torch.set_grad_enabled(grad):
            return compiled.function(tiles, [*vectors])

    def try_out(self, compiled: Compiled, tiles: list[Tensor], vectors: Sequence[Tensor], grad: bool) -> None:
        """Run a compiled tape on a tile, and back where it has to: PyTorch compiles when it is first called."""
        made = [t for t in self.call(compiled, tiles, vectors, grad) if t.requires_grad]
        leaves = [t for t in (*tiles, *vectors) if t.requires_grad]
        if made and leaves:
            torch.autograd.grad(made, leaves, [torch.zeros_like(t) for t in made], allow_unused=True)


def why_not(program: Program) -> str | None:
    """Reason for not compiling a program's tapes, as far as its operators say so themselves."""
    for node in program.steps:
        if not node.op.uniform:
            return f"{node.label} minds where a tile lies"
        if isinstance(node.op, ReduceOp) and node.op.seeks:
            return f"{node.label} looks for its result by its very bits"
    return None
