"""Working on many slides at once, in processes of their own, and outliving any of these.

A reader's C code may crash on a broken slide, or the system may kill a process that needs too much memory.
Then the slides that were being worked on are tried again one by one, so that the guilty one is found and the
others are done. A process that makes no progress for long is ended, and its slide is given up.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
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
    while left:
        pool = _Pool(dict(left), min(workers, len(left)), arguments, report, stall)
        for number, outcome in pool.run():
            del left[number]
            yield number, outcome
        for number in pool.died:
            yield number, _run_alone(number, left.pop(number), arguments, report, stall)


def _notes(report: Report, number: int) -> Callable[[int, int], None]:
    return lambda done, total: report(number, done / max(1, total))


class _Pool:
    """One pool of processes with its jobs: which are handed out, how far each is, and which have ended.

    Where a process was ended because it had stalled, its slide has an outcome, and the others may simply go on.
    """

    def __init__(
        self, jobs: dict[int, Job], workers: int, arguments: tuple[Any, ...], report: Report, stall: float | None
    ) -> None:
        self.jobs = jobs
        self.workers = workers
        self.arguments = arguments
        self.report = report
        self.watch = StallWatch(stall)
        self.shared = _shared(max(jobs) + 1)
        self.futures: dict[Future[Any], int] = {}
        self.finished: set[int] = set()
        self.stalled = self.broken = False

    def run(self) -> Generator[tuple[int, Any], None, None]:
        """Runs jobs until all are done or a process dies; yields the number and the outcome of each as it comes."""
        ahead = iter(self.jobs.items())
        try:
            with serving() as served, _processes(self.workers, self.shared) as pool:
                while self.hand_out(pool, ahead):
                    done, _ = wait(self.futures, timeout=_POLL, return_when=FIRST_COMPLETED)
                    if not done:
                        served.check()
                    yield from self.look()
                    yield from self.outcomes(done)
        except BrokenProcessPool:
            self.broken = True

    def hand_out(self, pool: Executor, ahead: Iterator[tuple[int, Job]]) -> bool:
        """Hands out the next jobs, as long as the pool is whole; whether any are out."""
        try:
            for number, job in itertools.islice(ahead, 0 if self.broken else _AHEAD * self.workers - len(self.futures)):
                self.futures[pool.submit(_attempt_in_worker, number, job, *self.arguments)] = number
        except BrokenProcessPool:
            self.broken = True
        return bool(self.futures)

    def look(self) -> Iterator[tuple[int, Failure]]:
        """Reports the progress of what is out, and gives up the first slide that makes none."""
        for number in set(self.futures.values()) - self.finished:
            ready, total, pid = self.shared[_FIELDS * number : _FIELDS * (number + 1)]
            if not total:
                continue
            self.report(number, ready / total)
            if not self.stalled and self.watch.is_stalled(number, ready):
                yield number, self.give_up(number, pid, ready / total)

    def give_up(self, number: int, pid: int, share: float) -> Failure:
        """Ends the process of a slide that makes no progress."""
        self.stalled = True  # ending one process breaks the pool, and all others begin anew
        self.finished.add(number)
        failure = Failure(str(self.jobs[number].slide), "Stalled", self.watch.reason(pid, share))
        end(pid)
        return failure

    def outcomes(self, done: Iterable[Future[Any]]) -> Iterator[tuple[int, Any]]:
        """What has come of jobs, but not of those whose process died, or whose slide was given up."""
        for future in done:
            number = self.futures.pop(future)
            try:
                outcome = future.result()
            except BrokenProcessPool:
                self.broken = True
                continue
            if number not in self.finished:
                self.finished.add(number)
                yield number, outcome

    @property
    def died(self) -> list[int]:
        """The jobs that were being worked on when a process died by itself, one at least."""
        if self.stalled or not self.broken:
            return []
        started = [n for n in self.jobs if self.shared[_FIELDS * n + 1] and n not in self.finished]
        return started or [min(self.jobs.keys() - self.finished)]


def _run_alone(number: int, job: Job, arguments: tuple[Any, ...], report: Report, stall: float | None) -> Any:
    """One job in a fresh process: if that dies too, the slide is the reason."""
    for _, outcome in _Pool({number: job}, 1, arguments, report, stall).run():
        return outcome
    reason = "the process that read it died: a crash in a reader, or too little memory"
    return Failure(str(job.slide), "ProcessDied", reason)
