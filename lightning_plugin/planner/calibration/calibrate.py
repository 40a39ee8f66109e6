"""The rates of this machine's own device: measured once, in seconds, and kept in the user's cache.

A file is valid for one device, one version of torch and one number of threads. Plans depend on rates, so nothing is
measured behind the user's back: without a file the built-in table ranks the plans.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from lightning_plugin.planner import cache
from lightning_plugin.planner.calibration.measure import measure
from lightning_plugin.planner.costs.rates import Rates, is_here, kinds, rates_of

log = logging.getLogger(__name__)

CPUINFO = Path("/proc/cpuinfo")


def calibrate(device: str | torch.device | None = None) -> Rates:
    """Measure how fast this machine's device is, and keep the result for later plans.

    It takes some seconds, in which nothing else should run. `TiledModule` and the strategies use the result from then
    on, and so does `make_plan` where ``device`` is this device's kind (``"cpu"``, ``"cuda"``). Plans that exist are not
    changed, nor are those of a run that is resumed.
    """
    found = local(device)
    rates = measure(found)
    keep(rates, key(found))
    return rates


def calibrated(device: str | torch.device | None = None) -> Rates | None:
    """Rates that `calibrate` measured for this device, this version of torch and this number of threads; None if it has
    not."""
    about = key(local(device))
    path = place(about)
    if path is None or not path.is_file():
        return None
    try:
        data = json.loads(cache.read(path))
        rates = Rates(**data["rates"])
        if data["key"] == about and all(r > 0 or name in ("workspace", "cache") for name, r in asdict(rates).items()):
            return rates
        raise ValueError("it is of another device, or holds a rate that is not positive")
    except cache.DAMAGED as error:
        log.warning("%s is ignored (%s); lightning_plugin.calibrate() writes it anew", path, error)
        return None


def local_rates(device: str) -> Rates:
    """The rates of a device by name: measured, where it is this machine's own and was calibrated, else the table's."""
    if is_here(device):
        found = calibrated(device)
        if found is not None:
            return found
    return rates_of(device)


def local(device: str | torch.device | None) -> torch.device:
    """The device that is meant: by default the accelerator, if there is one."""
    found = torch.device(device if device is not None else kinds()[-1])
    if found.type not in kinds():
        raise ValueError(f"this machine has no device {found.type!r} to measure; it has {', '.join(kinds())}")
    return found


def key(device: torch.device) -> dict[str, Any]:
    """The device, version of torch and number of threads that a measurement is valid for."""
    rates = sorted(f.name for f in fields(Rates))
    return {"device": name_of(device), "torch": torch.__version__, "threads": torch.get_num_threads(), "rates": rates}


def name_of(device: torch.device) -> str:
    """The name of a device's model."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if CPUINFO.is_file():
        for line in CPUINFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{device.type}, {line.partition(':')[2].strip()}"
    return f"{device.type}, {platform.processor() or platform.machine()}"


def place(about: dict[str, Any]) -> Path | None:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    kept = cache.folder()
    return None if kept is None else kept / f"rates-{digest}.json"


def keep(rates: Rates, about: dict[str, Any]) -> None:
    path = place(about)
    if path is not None:
        cache.write(path, json.dumps({"key": about, "rates": asdict(rates)}, indent=1) + "\n")
