"""Compilation of tapes by `torch.compile`.

[Note: compiled] A tape is a function of tensors that runs for all tiles of a kind. With the option ``compile``, a tape
that has run often in a direction is traced to PyTorch's operators on fake tensors and compiled, once for each kind and
direction; it is kept with the findings. Reading tiles, writing maps and accumulating gradients stay as they are. The
first tile of each kind in a pass runs uncompiled, so that the ledger counts its operators: of a compiled tile it counts
the results alone. Operators whose results are unread are not compiled; they run after it on the inputs that it returns:
see [Note: unread] in `rules.unread`.

A tape is not compiled, with a warning that names the reason, if an operator depends on the tile's position (random
numbers), if tiles hand rows on, if backward compares values with a result for equality (compiled tiles may round
differently in forward and in backward), if the findings do not last until the next step, or if PyTorch cannot trace or
compile it. Tiles that read keys in pieces are not compiled either.
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
from lightning_plugin.program.tape import Emit, Instruction, Tape

#: Number of runs before a tape is compiled: compiling takes as long as some hundreds of small tiles.
RUNS_BEFORE_COMPILING = 32
#: Options of `torch.compile`. PyTorch's guards check the sizes of a tape's tensors before each call, so that checks
#: within every kernel, which take as long as some kernels, are not needed.
INDUCTOR_OPTIONS: dict[Compile, dict[str, Any]] = {
    "tiles": {"size_asserts": False},
    "graphs": {"size_asserts": False, "triton.cudagraphs": True},
}

Function = Callable[[list[Tensor], list[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class CompiledTape:
    """Tape as one compiled function.

    Attributes:
        function: Returns the tensors that the tape emits, target after target.
        counts: Each target, and the number of its tensors.
        unread: Instructions whose results are unread, by target; the function returns their inputs.
    """

    function: Function
    counts: tuple[tuple[int, int], ...]
    unread: Mapping[int, Instruction]

    def emit(self, outputs: Sequence[Tensor], vectors: Sequence[Tensor], owned: Sequence[Any], emit: Emit) -> None:
        """Emit the outputs of a tile, target by target, as the tape does."""
        rest = iter(outputs)
        for target, count in self.counts:
            made = [next(rest) for _ in range(count)]
            if target in self.unread:
                with torch.enable_grad():
                    made = [self.unread[target].without_result(made, vectors)]
            emit(target, owned[target], made)


@dataclass(eq=False)
class CompiledTapes:
    """The compiled tapes of a program on a grid, by the kind of their tiles and whether they run with grad.

    Attributes:
        runs: Number of runs of each kind's tape.
        tapes: The compiled tapes; None for one that cannot be compiled.
    """

    runs: Counter[tuple[Hashable, bool]] = field(default_factory=Counter)
    tapes: dict[tuple[Hashable, bool], CompiledTape | None] = field(default_factory=dict)


@dataclass(eq=False)
class Compiler:
    """Compiler of the tapes of a module's steps.

    Attributes:
        how: The user's option.
        backend: That of `torch.compile`.
        reasons: Reasons for not compiling of which the user was warned.
    """

    how: Compile
    backend: str = "inductor"
    reasons: set[str] = field(default_factory=set)

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
        """Run a tape compiled, if it has run often enough.

        Args:
            known: The compiled tapes so far.
            kind: The kind of the tile.
            tape: The tape of the kind.
            program: The program of the tape.
            tiles: The tile's inputs; the list is emptied.
            vectors: The program's vectors.
            grad: True in backward.
            ledger: The step's ledger, which counts the outputs.

        Returns:
            A function that emits the outputs; None if the tape is not compiled, and nothing ran.
        """
        known.runs[kind, grad] += 1
        if known.runs[kind, grad] < RUNS_BEFORE_COMPILING or not all(isinstance(tile, Tensor) for tile in tiles):
            return None
        with unwatched(ledger):
            if (kind, grad) not in known.tapes:
                known.tapes[kind, grad] = self.try_compile(tape, program, tiles, vectors, grad)
            compiled = known.tapes[kind, grad]
            if compiled is None:
                return None
            outputs = self.call(compiled, tiles, vectors, grad)
        tiles.clear()
        if ledger is not None:
            for tensor in outputs:
                ledger.count(tensor)
        return partial(compiled.emit, outputs, vectors)

    def try_compile(
        self, tape: Tape, program: Program, tiles: list[Tensor], vectors: Sequence[Tensor], grad: bool
    ) -> CompiledTape | None:
        """Compile a tape for tensors like these and run it once; None with a warning if that fails."""
        try:
            made = self.trace_and_compile(tape, program, tiles, vectors, grad)
            self.warm_up(made, tiles, vectors, grad)
        except Exception as error:  # whatever PyTorch raises: the tape computes the same, or raises it again
            self.warn_once(program, f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}")
            return None
        return made

    def can_compile(self, program: Program, scans: bool, lasting: bool) -> bool:
        """True if a program's tapes may be compiled.

        Args:
            program: The program.
            scans: Its tiles hand rows on.
            lasting: The next step runs the same tapes.
        """
        reason = "its tiles hand rows on" if scans else obstacle(program)
        if reason is None and not lasting:
            reason = "they may compute another function in the next step"
        if reason is not None:
            self.warn_once(program, reason)
        return reason is None

    def warn_once(self, program: Program, reason: str) -> None:
        """Warn, once for each reason, that tiles are not compiled."""
        if reason not in self.reasons:
            self.reasons.add(reason)
            names = f"{program.nodes[0].label} … {program.nodes[-1].label}"
            warnings.warn(f"the tiles of {names} are not compiled: {reason}", stacklevel=2)

    def trace_and_compile(
        self, tape: Tape, program: Program, tiles: list[Tensor], vectors: Sequence[Tensor], grad: bool
    ) -> CompiledTape:
        """Trace a tape and give it to `torch.compile`, which compiles it at the first call."""
        emits: list[tuple[int, int]] = []
        tape, unread = tape.without_unread() if grad else (tape, {})

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
        asked = INDUCTOR_OPTIONS[self.how] if self.backend == "inductor" else None
        return CompiledTape(
            torch.compile(traced, backend=self.backend, options=asked, dynamic=False), tuple(emits), unread
        )

    def call(
        self, compiled: CompiledTape, tiles: list[Tensor], vectors: Sequence[Tensor], grad: bool
    ) -> Sequence[Tensor]:
        """Run a compiled tape on a tile."""
        if self.how == "graphs":
            torch.compiler.cudagraph_mark_step_begin()  # results of the tile before are not in use any more
        with torch.set_grad_enabled(grad):
            return compiled.function(tiles, [*vectors])

    def warm_up(self, compiled: CompiledTape, tiles: list[Tensor], vectors: Sequence[Tensor], grad: bool) -> None:
        """Run a compiled tape on a tile, and its backward: PyTorch compiles at the first call."""
        made = [t for t in self.call(compiled, tiles, vectors, grad) if t.requires_grad]
        leaves = [t for t in (*tiles, *vectors) if t.requires_grad]
        if made and leaves:
            torch.autograd.grad(made, leaves, [torch.zeros_like(t) for t in made], allow_unused=True)


def obstacle(program: Program) -> str | None:
    """Return the operator that keeps a program's tapes from being compiled, with the reason; None if there is none."""
    for node in program.nodes:
        if not node.op.uniform:
            return f"{node.label} depends on the position of a tile"
        if isinstance(node.op, ReduceOp) and node.op.compares_results:
            return f"{node.label} compares values with its result for equality"
    return None
