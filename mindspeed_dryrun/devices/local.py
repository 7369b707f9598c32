"""The card of this machine, as its driver's own tool describes it. Only read when asked for: `--device here`, `doctor`."""

from __future__ import annotations

import re
import shutil
import subprocess

from mindspeed_dryrun.devices.device import Device
from mindspeed_dryrun.devices.hardware import names, read_hardware
from mindspeed_dryrun.errors import UsageError

HERE = "here"
_LIMIT_S = 20.0
# | 0     910B3               | OK            | 93.7        42                0    / 0             |
# | 0                         | 0000:C1:00.0  | 0           0    / 0          3363 / 65536         |
_CARD = re.compile(
    r"^\|\s*\d+\s+(?:Ascend)?([0-9A-Za-z]*\d[0-9A-Za-z]*)\s*\|[^|\n]*\|[^|\n]*\|\s*\n"
    r"\|[^|\n]*\|[^|\n]*\|[^\n]*?(\d+)\s*/\s*(\d+)\s*\|\s*$",
    re.MULTILINE,
)


def local_device() -> Device:
    """The device of this machine's first card; `UsageError` where there is none, or where it is not known."""
    tool = shutil.which("npu-smi")
    if tool is None:
        raise UsageError(
            "--device here reads this machine's card with npu-smi, and there is no npu-smi. Name the device instead."
        )
    try:
        done = subprocess.run([tool, "info"], capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"npu-smi info failed ({error}). Name the device with --device.") from None
    return read_card(done.stdout)


def read_card(text: str) -> Device:
    """The device that `npu-smi info` describes: its chip, and the size of its memory."""
    found = _CARD.search(text)
    if not found:
        raise UsageError("npu-smi info lists no card. Name the device with --device.")
    chip, size_mb = found[1], int(found[3])
    known = [read_hardware(name) for name in names()]
    same_size = [hardware for hardware in known if hardware.hbm_mb == size_mb]
    exact = [hardware for hardware in same_size if chip.lower() in hardware.name.lower().split()[1:2]]
    family = [hardware for hardware in same_size if re.sub(r"(?<=B)\d$", "", chip).lower() in hardware.key]
    if not (exact or family):
        raise UsageError(
            f"This machine has a {chip} with {size_mb}M, which no device file describes. Name a device with --device, "
            "or read the card from the logs of a real run with --device-from."
        )
    return (exact or family)[0].device
