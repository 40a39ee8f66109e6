"""The same work on a Dask cluster: a local one, or one whose scheduler's address is given."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from wsi_trainer.errors import UserError

from .convert import Job
from .pool import Done, Failure, Report, Work, attempt


def work_on_dask(
    work: Work[Done], jobs: Sequence[Job], *, workers: int, report: Report, address: str
) -> Generator[tuple[int, Done | Failure], None, None]:
    """Works on the slides of all jobs; yields the number and the outcome of each as it comes.

    Args:
        work: What is done to each. Folders that it names, and slides, must be reachable from the workers.
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
