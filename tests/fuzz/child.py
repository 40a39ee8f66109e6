"""A process in which cases run, since a decoder in C may end it: `FORMAT<tab>SEED` in, a line of JSON out.

Seed -1 asks for the good files as they are.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
import tempfile
import traceback
from pathlib import Path

LIMIT = 12 << 30
"""Bytes of addresses: a file that asks for more than there is gets an error and not the machine."""


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")  # what libraries print does not get between answers
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    logging.disable(logging.CRITICAL)
    from tests.fuzz.cases import Bench, Outcome

    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    folder = Path(sys.argv[1])
    bench = Bench(Path(tempfile.mkdtemp(dir=folder)))
    (folder / "changed_at").write_text(str(bench.changed))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        name, _, seed = line.rstrip("\n").partition("\t")
        try:
            outcome = bench.run(name, int(seed)) if int(seed) >= 0 else bench.unchanged(name)
        except Exception:  # a fault of the fuzzing, not of what is fuzzed
            outcome = Outcome("broken", traceback.format_exc())
        print(json.dumps(outcome.record()), file=answers, flush=True)
    os._exit(0)  # threads of a server that a case has begun do not keep the process


if __name__ == "__main__":
    main()
