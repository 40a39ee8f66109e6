"""The number that a map explains."""

from __future__ import annotations

from torch import Tensor

from wsi_trainer.errors import UserError
from wsi_trainer.models.tasks import BinaryTask, Task


def targets_of(task: Task) -> tuple[str, ...]:
    """What can be explained: the classes, or else the one number that is predicted."""
    return task.classes or task.names[:1]


def index_of(task: Task, name: str | None) -> int:
    """The place of a target; without a name the second class of two, the last of an order, or the first of others."""
    names = targets_of(task)
    if name is None:
        return 0 if len(names) == task.outputs else len(names) - 1
    if name not in names:
        raise UserError(f"--target is {name!r}; this model has {', '.join(names)}")
    return names.index(name)


def score(task: Task, logits: Tensor, target: int) -> Tensor:
    """The score of one slide's target, from its (1, outputs) logits.

    The logit of a class; of the negative class of two the negated one; of a class of an order the logarithm of its
    probability; of a task without classes the number it predicts.
    """
    if isinstance(task, BinaryTask):
        return logits[0, 0] if target == 1 else -logits[0, 0]
    if not task.classes:
        return task.predict(logits)[0, 0]
    if len(task.classes) == task.outputs:
        return logits[0, target]
    return task.predict(logits)[0, target].log()
