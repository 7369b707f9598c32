"""What a peak is judged by: the device, the budget and the margin to leave. Kept in `job.json`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from mindspeed_dryrun.devices.device import SIMULATED_MB, Device
from mindspeed_dryrun.devices.real_runs import Excess, seen_excess
from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.record.worker_log import read_worker_log, worker_logs
from mindspeed_dryrun.units import parse_size_mb


@dataclass(frozen=True, kw_only=True)
class Criteria:
    """The yardstick of a verdict."""

    device: Device
    budget_mb: int
    excess: Excess | None = None
    margin: str | None = None  # `--margin`: a size, or a share of the budget such as 2%

    def needed_mb(self, peak_mb: int) -> int | None:
        """What real runs were seen to need above a dry run of this peak."""
        return None if self.excess is None else math.ceil(self.excess.share * peak_mb)

    @property
    def asked_mb(self) -> int | None:
        """The margin that the user asked for."""
        return None if self.margin is None else parse_margin(self.margin, self.budget_mb)


def make_criteria(
    device: Device | None = None, budget_mb: int | None = None, margin: str | None = None, engine: str = "mindspore"
) -> Criteria:
    """The criteria of a run: the default device where none is named, all of its usable memory where no budget is."""
    device = device or named_device()
    budget = device.usable_mb if budget_mb is None else budget_mb
    if margin is not None:
        parse_margin(margin, budget)
    return Criteria(device=device, budget_mb=budget, excess=seen_excess(engine), margin=margin)


def named_device(name: str | None = None) -> Device:
    """A device by its name, of a file, or of this machine (`here`); the default without one."""
    from mindspeed_dryrun.devices.hardware import DEFAULT, read_hardware
    from mindspeed_dryrun.devices.local import HERE, local_device

    if name == HERE:
        return local_device()
    return read_hardware(name or DEFAULT).device


def device_of_logs(folder: Path) -> Device:
    """The real card whose memory MindSpore printed into the worker logs of a real run; the smallest of several."""
    logs = [read_worker_log(file, rank) for rank, file in worker_logs(folder).items()]
    found = [(log.usable_mb, log.device_total_mb) for log in logs if log.usable_mb and log.device_total_mb]
    if not found:
        raise UsageError(
            f"The worker logs in {folder} do not print the device's memory ('Device MOC memory size'). "
            "Run with GLOG_v=1, or name the device with --device."
        )
    usable, total = min(found)
    if (total, usable) == SIMULATED_MB:
        raise UsageError(
            f"The logs in {folder} come from a simulation ({total}M is MindSpore's simulated device). "
            "Give the worker logs of a real run."
        )
    return Device(name="from-logs", title=f"the card of {folder}", total_mb=total, usable_mb=usable, source="measured")


def parse_margin(text: str, budget_mb: int) -> int:
    """`2%` of the budget, or a size such as 1G, in MB."""
    if not text.strip().endswith("%"):
        return parse_size_mb(text)
    try:
        share = float(text.strip()[:-1])
    except ValueError:
        share = math.nan
    if not 0 <= share < 100:
        raise UsageError(f"--margin '{text}' is not a share: write 2% or a size such as 1G.")
    return math.ceil(share / 100 * budget_mb)
