"""The result of one check, and how a check that fails becomes a result instead of a crash."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How a check ended. `absent` is an extra that is not installed: no fault; `failed` is one."""

    OK = "ok"
    ABSENT = "absent"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Check:
    """One line of the doctor's table.

    Args:
        group: the heading it stands under
        name: what was tried
        status: how it ended
        detail: a version, a size, or what went wrong
        fix: the command or the step that mends it, if there is something to mend
    """

    group: str
    name: str
    status: Status
    detail: str = ""
    fix: str = ""


def attempt(group: str, name: str, trial: Callable[[], str], fix: str = "") -> Check:
    """Run the trial: its text on success; on any error a failed check that carries the error's own words."""
    try:
        return Check(group, name, Status.OK, trial())
    except Exception as error:  # the doctor reports whatever is broken and goes on
        return Check(group, name, Status.FAILED, f"{type(error).__name__}: {first_line(error)}", fix)


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).splitlines() or [""])[0]


def healthy(checks: Iterable[Check]) -> bool:
    """Whether all that must work works; an absent extra or a warning does not count against it."""
    return all(check.status is not Status.FAILED for check in checks)
