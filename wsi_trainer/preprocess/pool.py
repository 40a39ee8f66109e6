"""Work on many slides at once, in processes that may crash or hang without harm to the others.

A reader's C code may crash on a broken slide, or the system may end a process for want of memory: its slide is tried
once more when nothing else runs, and then reported. A slide that takes far longer than its size explains is given up.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from wsi_trainer.errors import UserError
from wsi_trainer.signals import end_children, end_with_parent
from wsi_trainer.slide.identity import source_bytes
from wsi_trainer.store.convert import Job

_POLL = 0.3  # seconds between looks at the progress
_AHEAD = 2  # jobs handed out for each process: a million at once would be searched through at every look
_STALL = 30 * 60.0  # seconds
_SLOWEST = 1 << 19  # bytes of a slide a second: a tenth of what one core decodes and compresses
_TOPIC = "wsi-train"  # of the events by which Dask's workers tell of their progress


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
_shares: Any = None  # in a worker: the share of each job that is done, in shared memory


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
    """Seconds after which a slide without a size is given up; None for never."""
    if minutes is None:
        return _STALL
    if not 0 <= minutes < float("inf"):
        raise UserError(f"--stall-minutes {minutes:g}: expected minutes, or 0 to wait for ever")
    return minutes * 60 or None


def limit_of(job: Job, stall: float | None) -> float | None:
    """Seconds that a slide may take: those of an empty one, and more with the size of its file."""
    if stall is None:
        return None
    try:
        return stall + source_bytes(job.slide) / _SLOWEST
    except OSError:  # whoever reads it says why
        return stall


def _stalled(job: Job, stall: float | None) -> Failure:
    minutes = (limit_of(job, stall) or 0.0) / 60
    return Failure(str(job.slide), "Stalled", f"not done after {minutes:.3g} minutes, which its size does not explain")


def _died(job: Job, how: str = "a crash in a reader, or too little memory") -> Failure:
    return Failure(str(job.slide), "ProcessDied", f"the process that read it died: {how}")


def work_on_all(
    work: Work[Done], jobs: Sequence[Job], *, workers: int, report: Report, stall: float | None = None
) -> Generator[tuple[int, Done | Failure], None, None]:
    """Works on the slides of all jobs; yields the number and the outcome of each as it comes.

    Args:
        work: The function of a job.
        jobs: The slides.
        workers: Processes; a single job is done in this one, by as many threads.
        report: Hears how far each job is.
        stall: Seconds, besides those for its size, after which a slide is given up. None waits for ever, as does a run
            of one slide, where nobody waits for the next.
    """
    if len(jobs) <= 1 or (workers == 1 and stall is None):
        for number, job in enumerate(jobs):
            yield number, attempt(work, job, workers, _reporter(report, number))
        return
    threads = max(1, workers // len(jobs))
    shares = _SPAWN.Array("d", len(jobs), lock=False)
    died: list[int] = []
    with _processes(min(workers, len(jobs)), shares) as pool:

        def outcomes(numbers: Iterable[int], most: int) -> Iterator[tuple[int, Done | Failure | None]]:
            """Runs jobs, so many handed out at a time; yields the outcome of each, or None if its process died."""
            waiting = iter(numbers)
            running: dict[ProcessFuture[Any], int] = {}
            while True:
                for number in itertools.islice(waiting, most - len(running)):
                    arguments, limit = (number, work, jobs[number], threads), limit_of(jobs[number], stall)
                    running[pool.schedule(_attempt_in_worker, args=arguments, timeout=limit)] = number
                if not running:
                    return
                done, _ = wait(running, timeout=_POLL, return_when=FIRST_COMPLETED)
                for number in running.values():
                    report(number, shares[number])
                for future in [future for future in running if future in done]:
                    number = running.pop(future)
                    try:
                        yield number, future.result()
                    except ProcessExpired:
                        yield number, None
                    except TimeoutError:  # its process is ended
                        yield number, _stalled(jobs[number], stall)

        for number, outcome in outcomes(range(len(jobs)), _AHEAD * workers):
            if outcome is None:
                died.append(number)
            else:
                yield number, outcome
        for number, outcome in outcomes(died, 1):
            yield number, outcome or _died(jobs[number])


def _reporter(report: Report, number: int) -> Progress:
    return lambda done, total: report(number, done / max(1, total))


def _attempt_in_worker(number: int, work: Work[Done], job: Job, threads: int) -> Done | Failure:
    return attempt(work, job, threads, _reporter(_shares.__setitem__, number))


def _start_worker(shares: Any) -> None:
    global _shares
    _shares = shares
    end_with_parent()


@contextmanager
def _processes(workers: int, shares: Any) -> Iterator[ProcessPool]:
    others = frozenset(multiprocessing.active_children())
    pool = ProcessPool(workers, initializer=_start_worker, initargs=(shares,), context=_SPAWN)
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
    work: Work[Done], jobs: Sequence[Job], *, workers: int, report: Report, address: str, stall: float | None = None
) -> Generator[tuple[int, Done | Failure], None, None]:
    """Works on the slides of all jobs; yields the number and the outcome of each as it comes.

    Args:
        work: The function of a job. Folders that it names, and slides, must be reachable from the workers.
        jobs: The slides.
        workers: Processes of a local cluster.
        report: Hears how far each job is.
        address: Of a scheduler; `dask` starts a local cluster.
        stall: Seconds, besides those for its size, after which a slide is given up and its worker is begun anew. None
            waits for ever.
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
    begun: dict[int, tuple[float, str]] = {}

    def hear(event: tuple[float, tuple[int, float, str]]) -> None:
        number, share, worker = event[1]
        if not share:
            begun[number] = time.monotonic(), worker
        report(number, share)

    with client:
        client.subscribe_topic(_TOPIC, hear)
        futures = {
            client.submit(_attempt_on_dask, number, work, job, pure=False, retries=1): number
            for number, job in enumerate(jobs)
        }
        completed, left = as_completed(list(futures)), {number: future for future, number in futures.items()}
        while left:
            batch = completed.next_batch(block=False)
            for future in batch:
                if left.pop(number := futures[future], None) is None:
                    continue
                ended = future.status == "finished"
                yield number, future.result() if ended else _died(jobs[number], f"on the cluster: {future.exception()}")
            for number, (since, worker) in list(begun.items()) if stall is not None else ():
                if number in left and time.monotonic() - since > (limit_of(jobs[number], stall) or 0.0):
                    client.cancel([left.pop(number)], force=True)
                    client.restart_workers([worker], raise_for_error=False)  # Dask does not end a task that hangs
                    yield number, _stalled(jobs[number], stall)
            if not batch:
                time.sleep(_POLL)


def _attempt_on_dask(number: int, work: Work[Done], job: Job) -> Done | Failure:
    from distributed import get_worker

    worker = get_worker()

    def tell(number: int, share: float) -> None:
        worker.log_event(_TOPIC, (number, share, worker.address))

    tell(number, 0.0)
    return attempt(work, job, progress=_reporter(tell, number))
