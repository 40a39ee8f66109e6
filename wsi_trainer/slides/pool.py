"""Working on many slides at once, in processes of their own, and outliving any of these.

A reader's C code may crash on a broken slide, or the system may kill a process that needs too much memory.
Then the slides that were being worked on are tried again one by one, so that the guilty one is found and the
others are done. A process that makes no progress for long is ended, and its slide is given up.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from wsi_trainer.errors import UserError
from wsi_trainer.stopping import end_children, end_with_parent

from .convert import Converted, Job, convert
from .serving import serving
from .settings import Settings
from .stall import StallWatch, end

_POLL = 0.3  # seconds between looks at the progress
_AHEAD = 2  # jobs handed out for each process: a million at once would be searched through at every look


@dataclass(frozen=True)
class Failure:
    """A slide that was not done, and why."""

    slide: str
    kind: str
    reason: str


Done = TypeVar("Done")
Work = Callable[[Job, Path, Settings, int, bool, Callable[[int, int], None]], Done]
"""What is done to a slide: with the folder, settings, threads, whether to do it anew, and what hears of progress."""
Outcome = Converted | Failure
Report = Callable[[int, float], None]
"""Called with the number of a job and the share of it that is done."""

_SPAWN = multiprocessing.get_context("spawn")
_FIELDS = 3  # numbers for each job in shared memory: what is done, of how much, and the process that does it
_progress: Any = None  # in a worker: that memory


def attempt(
    job: Job, out: Path, settings: Settings, threads: int, overwrite: bool,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:  # fmt: skip
    """Converts a slide; what is wrong with it is returned and not raised."""
    return attempt_work(_convert, job, out, settings, threads, overwrite, progress)


def _convert(
    job: Job, out: Path, settings: Settings, threads: int, overwrite: bool, progress: Callable[[int, int], None]
) -> Converted:
    return convert(job, out, settings, threads=threads, overwrite=overwrite, progress=progress)


def attempt_work(
    work: Work[Done], job: Job, out: Path, settings: Settings, threads: int, overwrite: bool,
    progress: Callable[[int, int], None],
) -> Done | Failure:  # fmt: skip
    """Does it to a slide; what is wrong with the slide is returned and not raised."""
    try:
        return work(job, out, settings, threads, overwrite, progress)
    except UserError as error:
        reason = getattr(error, "reason", str(error))
        return Failure(str(job.slide), type(error).__name__, reason)
    except OSError as error:
        if error.errno is not None and error.filename is None and error.strerror:
            return Failure(str(job.slide), type(error).__name__, error.strerror)
        return Failure(str(job.slide), type(error).__name__, str(error))
    except Exception as error:  # one bad slide must not end the others; the kind tells a bug from bad data
        return Failure(str(job.slide), type(error).__name__, str(error) or "no message")


def workers_of(asked: int | None) -> int:
    """How many processes; without a number one for each core, at most 8."""
    workers = min(8, os.cpu_count() or 1) if asked is None else asked
    if workers < 1:
        raise UserError(f"--workers {workers}: expected 1 or more")
    return workers


def _start_worker(shared: Any) -> None:
    global _progress
    _progress = shared
    end_with_parent()


def _attempt_in_worker(
    number: int, job: Job, work: Work[Done], out: Path, settings: Settings, threads: int, overwrite: bool
) -> Done | Failure:
    def note(done: int, total: int) -> None:
        _progress[_FIELDS * number : _FIELDS * (number + 1)] = [done, max(1, total), os.getpid()]

    note(0, 1)
    return attempt_work(work, job, out, settings, threads, overwrite, note)


def _shared(jobs: int) -> Any:
    """Memory in which processes note how far they are with each job."""
    return _SPAWN.Array("q", _FIELDS * jobs, lock=False)


@contextmanager
def _processes(workers: int, shared: Any) -> Iterator[Executor]:
    others = frozenset(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, mp_context=_SPAWN, initializer=_start_worker, initargs=(shared,))
    try:
        yield pool
    except BaseException:
        end_children(since=others)  # what they do can be continued, and nobody waits for it any more
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def run_all(
    jobs: Sequence[Job], out: Path, settings: Settings, *, workers: int, overwrite: bool, report: Report,
    stall: float | None = None,
) -> Generator[tuple[int, Outcome], None, None]:  # fmt: skip
    """Converts all jobs: `work_on_all` says how."""
    yield from work_on_all(
        _convert, jobs, out, settings, workers=workers, overwrite=overwrite, report=report, stall=stall
    )


def work_on_all(
    work: Work[Done], jobs: Sequence[Job], out: Path, settings: Settings, *, workers: int, overwrite: bool,
    report: Report, stall: float | None = None,
) -> Generator[tuple[int, Done | Failure], None, None]:  # fmt: skip
    """Does it to the slides of all jobs; yields the number and the outcome of each as it comes.

    `work` is a function of a module, which other processes import. `stall` is after how many seconds without progress
    a slide is given up; None waits for ever, as does a run of one slide, where nobody waits for the next.
    """
    if len(jobs) <= 1 or (workers == 1 and stall is None):
        for number, job in enumerate(jobs):
            note = _notes(report, number)
            yield number, attempt_work(work, job, out, settings, workers, overwrite, note)
        return
    threads = max(1, workers // len(jobs))
    left = dict(enumerate(jobs))
    arguments = (work, out, settings, threads, overwrite)
    died: list[int] = []
    while left:
        for number, outcome in _run_pool(dict(left), min(workers, len(left)), arguments, report, died, stall):
            del left[number]
            yield number, outcome
        for number in [n for n in died if n in left]:
            yield number, _run_alone(number, left.pop(number), arguments, report, stall)
        died.clear()


def _notes(report: Report, number: int) -> Callable[[int, int], None]:
    return lambda done, total: report(number, done / max(1, total))


def _run_pool(
    jobs: dict[int, Job], workers: int, arguments: tuple[Any, ...], report: Report, died: list[int],
    stall: float | None,
) -> Generator[tuple[int, Any], None, None]:  # fmt: skip
    """Runs jobs until all are done or a process dies; then `died` names those that were being worked on.

    Where a process was ended because it had stalled, its slide has an outcome, and the others may simply go on.
    """
    watch, stalled, broken = StallWatch(stall), False, False
    futures: dict[Future[Any], int] = {}
    finished: set[int] = set()
    shared = _shared(max(jobs) + 1)
    try:
        with serving() as served, _processes(workers, shared) as pool:
            ahead = iter(jobs.items())
            while True:
                try:
                    for number, job in itertools.islice(ahead, 0 if broken else _AHEAD * workers - len(futures)):
                        futures[pool.submit(_attempt_in_worker, number, job, *arguments)] = number
                except BrokenProcessPool:
                    broken = True
                if not futures:
                    break
                done, _ = wait(futures, timeout=_POLL, return_when=FIRST_COMPLETED)
                if not done:
                    served.check()
                for number in set(futures.values()) - finished:
                    ready, total, pid = shared[_FIELDS * number : _FIELDS * (number + 1)]
                    if not total:
                        continue
                    report(number, ready / total)
                    if not stalled and watch.is_stalled(number, ready):
                        stalled = True  # ending one process breaks the pool, and all others begin anew
                        finished.add(number)
                        failure = Failure(str(jobs[number].slide), "Stalled", watch.reason(pid, ready / total))
                        end(pid)
                        yield number, failure
                for future in done:
                    number = futures.pop(future)
                    try:
                        outcome = future.result()
                    except BrokenProcessPool:
                        broken = True
                        continue
                    if number not in finished:
                        finished.add(number)
                        yield number, outcome
    except BrokenProcessPool:
        broken = True
    if stalled or not broken:
        return
    started = [number for number in jobs if shared[_FIELDS * number + 1] and number not in finished]
    died.extend(started or [min(jobs.keys() - finished)])


def _run_alone(number: int, job: Job, arguments: tuple[Any, ...], report: Report, stall: float | None) -> Any:
    """One job in a fresh process: if that dies too, the slide is the reason."""
    for _, outcome in _run_pool({number: job}, 1, arguments, report, [], stall):
        return outcome
    reason = "the process that read it died: a crash in a reader, or too little memory"
    return Failure(str(job.slide), "ProcessDied", reason)
