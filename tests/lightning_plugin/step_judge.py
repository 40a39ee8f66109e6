"""Whether the engine did with a `Step` what plain PyTorch does.

**Errors.** Where plain PyTorch works, so does the engine. Where plain PyTorch refuses (something that backward needs
was changed), the engine may refuse too, in its own words, or give the number of the values as they were when they were
used: that of a plain run in which all that is changed later was copied first. It never gives another number. Two
things the engine may refuse although plain PyTorch works: writes that the table calls odd, with a `RecordingError`;
and to read pixels or parameters again that have been changed in the meantime, with an error that says so.

**float64.** Every loss, gradient and buffer to 1e-9 in the norm of the design. A few random steps multiply a rounding
error by more: there the bound is a hundred times what one rounding of the parameters does to plain PyTorch itself, but
never more than a millionth.

**float32, bfloat16, autocast.** One distance for the losses and all gradients together, one for the buffers: L2, to
the plain step in float64 from the same numbers. The engine's is at most twice plain PyTorch's own. Two cases need more
said:

* plain PyTorch's own distance is 0, or luckily small: no less is asked than what rounding the true result to the type
  leaves, ``eps / 2`` of the truth's norm (of bfloat16 under autocast);
* a maximum was decided by the last digit: which of two nearly equal values it is, is chance, in plain PyTorch as well.
  Where the engine is further off than twice, plain PyTorch's own distance is the largest of `TRIALS` runs whose
  parameters are one rounding off (pixels are not touched: what is equal by content stays equal, and an engine that
  loses the gradient of ties is not excused by it). Tests count these steps and bound their share;
* which kernel PyTorch takes, and how it rounds, depends on the size of a map: the weight gradient of one convolution on
  an image of one value is 1.4e-8 off at 10 rows, and 7.3e-7 at 9. A tile has another size than its image. Where the
  engine is further off still, plain PyTorch's own distance is the largest on images of half the rows, half the columns,
  half of both, and as large as the step's tiles, of the same content, relative to the truth there. These steps are
  counted too, and bounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_plugin import RecordingError
from tests.exactness import TOLERANCE, difference
from tests.lightning_plugin.step_parts import EDITS
from tests.lightning_plugin.step_runs import Outcome, run_plain, run_tiled
from tests.lightning_plugin.step_worlds import DTYPES
from tests.lightning_plugin.steps import Change, Nudge, Step

TRIALS = 64
#: No condition of a step excuses more than this in float64.
MOST = 1e-6
CANCELLED = 1e-12


@dataclass
class Verdict:
    """``faults``: what is wrong. ``kind``: what became of the step. ``ratio``: the engine's distance over plain
    PyTorch's (over the tolerance in float64)."""

    faults: list[str]
    kind: str
    ratio: float = 0.0


def judge(step: Step) -> Verdict:
    plain = run_plain(step)
    if plain.error is None and not finite(plain):
        run_tiled(step)  # no number to compare, but nothing may break
        return Verdict([], "no number in PyTorch")
    tiled = run_tiled(step)
    if plain.error is not None:
        return refused_by_plain(step, plain, tiled)
    if tiled.error is not None:
        if may_refuse(step, tiled.error):
            return Verdict([], "refused by the engine")
        return Verdict([f"action {tiled.at}: {type(tiled.error).__name__}: {tiled.error}"], "error")
    return compared(step, plain, tiled)


def faults(step: Step) -> list[str]:
    return judge(step).faults


def refused_by_plain(step: Step, plain: Outcome, tiled: Outcome) -> Verdict:
    if tiled.error is not None:
        return Verdict([], "refused by both")
    safe = run_plain(step, safe=True)
    if safe.error is not None:
        return Verdict([f"plain PyTorch refuses ({first_line(plain.error)}), the engine gives a number"], "no error")
    found = compared(step, safe, tiled, safe=True)
    told = f"plain PyTorch refuses ({first_line(plain.error)}), and the engine gives another number: "
    return Verdict([told + f for f in found.faults], "right where PyTorch refuses", found.ratio)


def may_refuse(step: Step, error: BaseException) -> bool:
    odd = any(EDITS[n.edit].odd for n in step.networks)
    if odd and isinstance(error, RecordingError):
        return True
    changed = any(isinstance(a, (Change, Nudge)) for a in step.actions)
    return changed and bool(re.search(r"chang|modif|in.?place", str(error)))


def compared(step: Step, plain: Outcome, tiled: Outcome, safe: bool = False) -> Verdict:
    if not tiled.buffers:
        plain = replace(plain, buffers={})
    wrong = missing(plain, tiled)
    if wrong:
        return Verdict(wrong, "compared")
    return exact(step, plain, tiled, safe) if step.dtype == "float64" else near(step, plain, tiled, safe)


def missing(plain: Outcome, tiled: Outcome) -> list[str]:
    """Return what one of the two has no number for: an optimizer tells a gradient of zeros from none."""
    found = [f"buffer {n} is missing" for n in plain.buffers.keys() ^ tiled.buffers.keys()]
    found += [f"loss {n} is missing" for n in plain.losses.keys() ^ tiled.losses.keys()]
    for name, e in plain.gradients.items():
        a = tiled.gradients[name]
        if (a is None) != (e is None):
            found.append(f"gradient {name} is {'missing' if a is None else 'there and should not be'}")
    return found


# float64 -------------------------------------------------------------------------------------------------------------


def exact(step: Step, plain: Outcome, tiled: Outcome, safe: bool) -> Verdict:
    errors = differences(plain, tiled)
    worst = max(errors.values(), default=0.0)
    suspects = {name: e for name, e in errors.items() if not e < TOLERANCE}
    if not suspects:
        return Verdict([], "compared", worst / TOLERANCE)
    jittered = run_plain(step, safe=safe, jitter=2e-16)
    condition = max(differences(plain, jittered).values(), default=0.0)
    bound = min(MOST, max(TOLERANCE, 100 * condition))
    wrong = [f"{name} is off by {e:.2g}" for name, e in suspects.items() if not e < bound]
    return Verdict(wrong, "compared" if wrong else "badly conditioned", worst / TOLERANCE)


def differences(plain: Outcome, tiled: Outcome) -> dict[str, float]:
    """Errors in the norm of the design. Where no gradient is more than `CANCELLED` of the losses, each is zero but for
    rounding (a mean over what a BatchNorm has centered, alone in a loss): the losses are their scale."""
    largest = max((g.abs().max().item() for g in plain.gradients.values() if g is not None), default=0.0)
    losses = max((e.abs().max().item() for e in plain.losses.values() if e.numel()), default=0.0)
    if largest < CANCELLED * losses:
        largest = losses
    found = {f"loss {n}": difference(tiled.losses[n], e, 1e-3) for n, e in plain.losses.items()}
    found |= {f"buffer {n}": difference(tiled.buffers[n], e, 1e-3) for n, e in plain.buffers.items()}
    for name, e in plain.gradients.items():
        a = tiled.gradients[name]
        if a is not None and e is not None:
            found[f"gradient {name}"] = difference(a, e, 1e-3 * largest)
    return found


# Fewer digits --------------------------------------------------------------------------------------------------------


def near(step: Step, plain: Outcome, tiled: Outcome, safe: bool) -> Verdict:
    truth = run_plain(step, torch.float64, safe=safe)
    if truth.error is not None or not finite(truth):
        return Verdict([], "no number in PyTorch")
    eps = torch.finfo(torch.bfloat16 if step.dtype == "autocast" else DTYPES[step.dtype]).eps
    wrong, worst, kind = [], 0.0, "compared"
    for name, pick in (("losses and gradients", results), ("buffers", running)):
        if pick is running and not tiled.buffers:
            continue
        true = pick(truth, truth)
        own = max((pick(plain, truth) - true).norm().item(), eps / 2 * true.norm().item())
        off = (pick(tiled, truth) - true).norm().item()
        if not off <= 2 * own:
            trials = [run_plain(step, safe=safe, jitter=eps / 2, seed=1 + i) for i in range(TRIALS)]
            own = max([own, *((pick(t, truth) - true).norm().item() for t in trials if t.error is None)])
            kind = "decided by a tie"
        if not off <= 2 * own:
            own = max([own, *(share * true.norm().item() for share in at_other_sizes(step, pick, safe))])
            kind = "rounded as at another size"
        worst = max(worst, off / own if own else 0.0)
        if not off <= 2 * own:
            wrong.append(f"{name} are {off:.3g} from float64, plain PyTorch's {own:.3g}, of {true.norm().item():.3g}")
    return Verdict(wrong, kind, worst)


def at_other_sizes(step: Step, pick: Callable[[Outcome, Outcome], Tensor], safe: bool) -> Iterator[float]:
    """Plain PyTorch's distance on smaller images, relative to the truth there."""
    grids = step.way.tiles, step.way.backward_tiles or step.way.tiles
    for rows, columns in dict.fromkeys(((2, 1), (1, 2), (2, 2), *grids)):
        images = tuple(replace(i, side=(max(1, i.side[0] // rows), max(1, i.side[1] // columns))) for i in step.images)
        smaller = replace(step, images=images)
        plain, truth = run_plain(smaller, safe=safe), run_plain(smaller, torch.float64, safe=safe)
        if plain.error is None and truth.error is None and finite(truth) and finite(plain):
            true = pick(truth, truth)
            if true.norm() > 0:
                yield ((pick(plain, truth) - true).norm() / true.norm()).item()


def results(outcome: Outcome, like: Outcome) -> Tensor:
    """Losses and gradients as one vector; a gradient that is not there is one of zeros."""
    gradients = [(outcome.gradients[n], e) for n, e in like.gradients.items() if e is not None]
    return vector([*outcome.losses.values(), *(torch.zeros_like(e) if g is None else g for g, e in gradients)])


def running(outcome: Outcome, like: Outcome) -> Tensor:
    return vector(list(outcome.buffers.values()))


def vector(tensors: list[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.float64), *(t.detach().double().flatten() for t in tensors)])


def finite(outcome: Outcome) -> bool:
    tensors = [*outcome.losses.values(), *outcome.buffers.values(), *outcome.gradients.values()]
    return all(bool(t.isfinite().all()) for t in tensors if t is not None)


def first_line(error: BaseException | None) -> str:
    return str(error).split(";")[0].split("\n")[0][:90]
