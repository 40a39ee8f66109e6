"""The default budget counts the limits of all control groups around the process, of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_plugin import memory

GIB = 2**30
UNLIMITED = str(2**63 - 4096)


def tree(root: Path, groups: str, limits: dict[str, str]) -> Path:
    """A file system with the process's groups and the limits of some."""
    for name, text in {"proc/self/cgroup": groups, **limits}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


SLURM = "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n"
JOB = "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7"
CASES = {
    "no files at all": (None, {}, None),
    "v2, a container with a group of its own": ("0::/\n", {"sys/fs/cgroup/memory.max": f"{2 * GIB}\n"}, 2 * GIB),
    "v2, no limit": ("0::/a/b\n", {"sys/fs/cgroup/a/b/memory.max": "max\n"}, None),
    "v2, SLURM limits the job, not the step": (
        SLURM,
        {f"{JOB}/memory.max": str(4 * GIB), f"{JOB}/step_0/memory.max": "max", f"{JOB}/step_0/user/memory.max": "max"},
        4 * GIB,
    ),
    "v2, nested": (
        "0::/user.slice/r.scope\n",
        {"sys/fs/cgroup/user.slice/memory.max": f"{3 * GIB}", "sys/fs/cgroup/user.slice/r.scope/memory.max": f"{GIB}"},
        GIB,
    ),
    "v2, a neighbour's limit does not count": ("0::/mine\n", {"sys/fs/cgroup/other/memory.max": str(GIB)}, None),
    "v2, mounted from within, as docker does": (
        "0::/docker/abc/x\n",
        {"sys/fs/cgroup/memory.max": str(2 * GIB), "sys/fs/cgroup/x/memory.max": "max"},
        2 * GIB,
    ),
    "v2, a group outside of what is mounted": (
        "0::/../../elsewhere\n", {"sys/fs/cgroup/memory.max": str(5 * GIB)}, 5 * GIB,
    ),
    "v1, SLURM": (
        "4:memory:/slurm/uid_1/job_7/step_0\n1:cpu:/\n0::/\n",
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED,
            "sys/fs/cgroup/memory/slurm/uid_1/job_7/memory.limit_in_bytes": str(6 * GIB),
            "sys/fs/cgroup/memory/slurm/uid_1/job_7/step_0/memory.limit_in_bytes": UNLIMITED,
        },
        6 * GIB,
    ),
    "v1, other hierarchies do not count": (
        "1:cpu:/small\n", {"sys/fs/cgroup/cpu/small/memory.limit_in_bytes": str(GIB)}, None,
    ),
    "both versions": (
        "4:memory:/job\n0::/job\n",
        {
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(8 * GIB),
            "sys/fs/cgroup/unified/job/memory.max": "max",
        },
        8 * GIB,
    ),
    "unreadable text": ("0::/\n", {"sys/fs/cgroup/memory.max": "lots"}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_limit_of_the_groups(name: str, tmp_path: Path) -> None:
    groups, limits, expected = CASES[name]
    root = tmp_path if groups is None else tree(tmp_path, groups, limits)
    assert memory.group_limit(root) == expected


def test_machine_memory_is_the_lesser_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "total_memory", lambda: 16 * GIB)
    for limit, expected in ((None, 16), (int(UNLIMITED), 16), (2 * GIB, 2)):
        monkeypatch.setattr(memory, "group_limit", lambda limit=limit: limit)
        assert memory.machine_memory() == expected * GIB
