"""List the devices that a verdict can be about, or read one from the worker logs of a real run.

mindspeed-dryrun device                 the devices that are known, the default first
mindspeed-dryrun device 910b-32g        one of them
mindspeed-dryrun device msrun_log/      the card that a real run printed; use it with launch --device-from msrun_log/
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from mindspeed_dryrun.devices.hardware import names
from mindspeed_dryrun.files import json_text
from mindspeed_dryrun.language import t
from mindspeed_dryrun.record.criteria import device_of_logs, named_device
from mindspeed_dryrun.report.text import columns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("device", nargs="?", metavar="NAME|DIR", help="a name, or a folder of worker_*.log files")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(args: argparse.Namespace) -> int:
    if args.device is None:
        found = [named_device(name) for name in names()]
    elif Path(args.device).exists() and not args.device.endswith((".yaml", ".yml")):
        found = [device_of_logs(Path(args.device))]
    else:
        found = [named_device(args.device)]
    if args.json:
        print(json_text([dataclasses.asdict(device) for device in found]), end="")
        return 0
    head = ["name", "device", "in all", "usable", "left outside", "source"]
    body = [
        [device.name, device.title, f"{device.total_mb}M", f"{device.usable_mb}M",
         f"{device.total_mb - device.usable_mb}M", t(device.source)]
        for device in found
    ]  # fmt: skip
    print("\n".join(columns(head, body, left=(0, 1, 5))))
    return 0
