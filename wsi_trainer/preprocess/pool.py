"""Work on many slides at once, in processes that may crash or hang without harm to the others.

A reader's C code may crash on a broken slide, or the system may end a process for want of memory: its slide is tried
once more when nothing else runs, and then reported. A slide that makes no progress for long is given up.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from wsi_trainer.errors import UserError
from wsi_trainer.signals import end_children, end_with_parent
from wsi_trainer.store.convert import Job

_POLL = 0.3  # seconds between looks at the progress
_AHEAD = 2  # jobs handed out for each process: a million at once would be searched through at every look
_STALL = 30 * 60.0  # seconds


@dataclass(frozen=True)
class Failure:
    """A slide that was not done, and why."""

    slide: str
    kind: str
    reason: str


Done = TypeVar("Done")
Progress = Callable[[int, int], None]
"""Called with how much of a slide is done, and how much there is."""
Work = Callable[..., Done]
"""A function `(job, threads=..., progress=...)`, which other processes import."""
Report = Callable[[int, float], None]
"""Called with the number of a job and the share of it that is done."""

_SPAWN = multiprocessing.get_context("spawn")
_FIELDS = 2  # numbers for each job in shared memory: what is done, and of how much
_progress: Any = None  # in a worker: that memory


def attempt(
    work: Work[Done], job: Job, threads: int = 1, progress: Progress = lambda done, total: None
) -> Done | Failure:
    """Works on a slide; what is wrong with it is returned and not raised."""
    try:
        return work(job, threads=threads, progress=progress)
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
    """Number of processes; by default one for each core, at most 8."""
    workers = min(8, os.cpu_count() or 1) if asked is None else asked
    if workers < 1:
        raise UserError(f"--workers {workers}: expected 1 or more")
    return workers


def stall_seconds(minutes: float | None) -> float | None:
    """Seconds without progress after which a slide is given up; None for never."""
    if minutes is None:
        return _STALL
    if not 0 <= minutes < float("inf"):
        raise UserError(f"--stall-minutes {minutes:g}: expected minutes, or 0 to wait for ever")
    return minutes * 60 or None


def work_on_all(
    work: Work[Done], jobs: Sequence[Job], *, workers: int, report: Report, stall: float | None = None
) -> Generator[tuple[int, Done | Failure], None, None]:
    """Works on the slides of all jobs; yields the number and the outcome of each as it comes.

    Args:
        work: The function of a job.
        jobs: The slides.
        workers: Processes; a single job is done in this one, by as many threads.
        report: Hears how far each job is.
        stall: Seconds without progress after which a slide is given up. None waits for ever, as does a run of one
            slide, where nobody waits for the next.
    """
    if len(jobs) <= 1 or (workers == 1 and stall is None):
        for number, job in enumerate(jobs):
            yield number, attempt(work, job, workers, _reporter(report, number))
        return
    threads = max(1, workers // len(jobs))
    shared = _SPAWN.Array("q", _FIELDS * len(jobs), lock=False)
    died: list[int] = []
    with _processes(min(workers, len(jobs)), shared) as pool:
        run = _Run(pool, work, jobs, threads, shared, report, stall)
        for number, outcome in run.outcomes(range(len(jobs)), _AHEAD * workers):
            if outcome is None:
                died.append(number)
            else:
                yield number, outcome
        for number, outcome in run.outcomes(died, 1):
            reason = "the process that read it died: a crash in a reader, or too little memory"
            yield number, outcome or Failure(str(jobs[number].slide), "ProcessDied", reason)


def _reporter(report: Report, number: int) -> Progress:
    return lambda done, total: report(number, done / max(1, total))


@dataclass
class _Run:
    """Jobs in a pool of processes."""

    pool: ProcessPool
    work: Work[Any]
    jobs: Sequence[Job]
    threads: int
    shared: Any
    report: Report
    stall: float | None
    seen: dict[int, tuple[int, float]] = field(default_factory=dict)
    """The last progress of each job, and when it was made."""

    def outcomes(self, numbers: Iterable[int], most: int) -> Iterator[tuple[int, Any]]:
        """Runs jobs, so many handed out at a time; yields the outcome of each, or None if its process died."""
        waiting = iter(numbers)
        running: dict[ProcessFuture[Any], int] = {}
        while True:
            for number in itertools.islice(waiting, most - len(running)):
                self.seen[number] = (-1, time.monotonic())
                arguments = (number, self.work, self.jobs[number], self.threads)
                running[self.pool.schedule(_attempt_in_worker, args=arguments)] = number
            if not running:
                return
            done, _ = wait(running, timeout=_POLL, return_when=FIRST_COMPLETED)
            for future, number in list(running.items()):
                if future in done:
                    del running[future]
                    try:
                        yield number, future.result()
                    except ProcessExpired:
                        yield number, None
                elif reason := self.stalled(number):
                    del running[future]
                    future.cancel()  # its process is ended
                    yield number, Failure(str(self.jobs[number].slide), "Stalled", reason)

    def stalled(self, number: int) -> str | None:
        """Reports the progress of a job; why it is given up, if it has made none for too long."""
        done, total = self.shared[_FIELDS * number : _FIELDS * (number + 1)]
        if total:
            self.report(number, done / total)
        before, since = self.seen[number]
        now = time.monotonic()
        if done != before or not total:  # it waits for its turn
            self.seen[number] = (done, now)
        elif self.stall is not None and now - since > self.stall:
            return f"no progress for {self.stall / 60:g} minutes, at {done / total:.0%} of the slide"
        return None


def _attempt_in_worker(number: int, work: Work[Done], job: Job, threads: int) -> Done | Failure:
    def note(done: int, total: int) -> None:
        _progress[_FIELDS * number : _FIELDS * (number + 1)] = [done, max(1, total)]

    note(0, 1)
    return attempt(work, job, threads, note)


def _start_worker(shared: Any) -> None:
    global _progress
    _progress = shared
    end_with_parent()


@contextmanager
def _processes(workers: int, shared: Any) -> Iterator[ProcessPool]:
    others = frozenset(multiprocessing.active_children())
    pool = ProcessPool(workers, initializer=_start_worker, initargs=(shared,), context=_SPAWN)
    try:
        yield pool
        pool.close()
    except BaseException:
        end_children(since=others)  # what they do can be continued, and nobody waits for it any more
        pool.stop()
        raise
    finally:
        pool.join()


def work_on_dask(
    work: Work[Done], jobs: Sequence[Job], *, workers: int, report: Report, address: str
) -> Generator[tuple[int, Done | Failure], None, None]:
    """Works on the slides of all jobs; yields the number and the outcome of each as it comes.

    Args:
        work: The function of a job. Folders that it names, and slides, must be reachable from the workers.
        jobs: The slides.
        workers: Processes of a local cluster.
        report: Hears what is done.
        address: Of a scheduler; `dask` starts a local cluster.
    """
    try:
        from distributed import Client, LocalCluster, as_completed
    except ImportError as error:
        raise UserError('--scheduler dask needs Dask: pip install "wsi-trainer[cluster]"') from error
    try:
        if address == "dask":
            client = Client(LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None))
        else:
            client = Client(address, timeout=10)
    except (OSError, ValueError) as error:
        raise UserError(f"--scheduler {address}: no Dask scheduler answers there ({error})") from error
    with client:
        futures = {client.submit(attempt, work, job, pure=False, retries=1): number for number, job in enumerate(jobs)}
        for future in as_completed(list(futures)):
            number = futures[future]
            report(number, 1.0)
            if future.status == "finished":
                yield number, future.result()
            else:
                reason = f"on the cluster: {future.exception()}"
                yield number, Failure(str(jobs[number].slide), "ProcessDied", reason)
