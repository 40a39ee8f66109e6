"""A command that is stopped, or killed, at its n-th touch of a folder: in a process of its own.

What Python tells its audit hooks is counted: files that are opened, renamed, cut off and removed, folders that are
made. So every moment at which what lies in the folder changes can be chosen, and chosen again.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NoReturn

from tests.warm import start
from wsi_trainer.cli import main

TOUCHES = ("open", "os.rename", "os.remove", "os.truncate", "os.mkdir", "os.rmdir")


def counting(folder: str, touches: int, number: int) -> None:
    """At that many touches of the folder this process sends itself a signal."""
    left = touches

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in TOUCHES and any(folder in str(a) for a in arguments[:2]):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), number)

    sys.addaudithook(heard)


def run(words: Sequence[str], folder: str, touches: int, number: int) -> NoReturn:
    """Run `wsi-train` with these words, up to a touch of the folder."""
    counting(folder, touches, number)
    sys.exit(main(words))


def started(words: Sequence[str], folder: Path, log: Path, touches: int, number: int) -> ForkServerProcess:
    """A process that runs a command, and sends itself a signal on its way."""
    return start(log, run, list(words), str(folder), touches, number)


def stopped(process: ForkServerProcess) -> bool:
    """Wait until a process has stopped itself, or ended; whether it stands."""
    while process.is_alive():
        # The process is a child of the server's, so that nobody tells us of it.
        try:
            state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            break
        if state in "Tt":
            return True
        time.sleep(0.01)
    return False


def go_on(process: ForkServerProcess) -> int:
    """Let a process that stands go on to its end; its exit code."""
    if process.is_alive() and process.pid is not None:
        os.kill(process.pid, signal.SIGCONT)
    process.join()
    assert process.exitcode is not None
    return process.exitcode
