"""The same work on a Dask cluster: a local one, or one whose scheduler's address is given."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path

from wsi_trainer.errors import UserError

from .convert import Job
from .pool import Failure, Outcome, Report, attempt
from .settings import Settings


def run_on_dask(
    jobs: Sequence[Job],
    out: Path,
    settings: Settings,
    *,
    address: str | None,
    workers: int,
    overwrite: bool,
    report: Report,
) -> Generator[tuple[int, Outcome], None, None]:
    """Converts all jobs on a cluster. OUT and the slides must be reachable from its workers."""
    try:
        from distributed import Client, LocalCluster, as_completed
    except ImportError as error:
        raise UserError('--scheduler dask needs Dask: pip install "wsi-trainer[cluster]"') from error
    try:
        if address:
            client = Client(address, timeout=10)
        else:
            client = Client(LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None))
    except (OSError, ValueError) as error:
        raise UserError(f"--scheduler {address}: no Dask scheduler answers there ({error})") from error
    with client:
        futures = {
            client.submit(attempt, job, out.resolve(), settings, 1, overwrite, pure=False, retries=1): number
            for number, job in enumerate(jobs)
        }
        for future in as_completed(list(futures)):
            number = futures[future]
            report(number, 1.0)
            if future.status == "finished":
                yield number, future.result()
            else:
                yield (
                    number,
                    Failure(str(jobs[number].slide), "ProcessDied", f"on the cluster: {future.exception()}"),
                )
