"""`python -m mindspeed_dryrun.trainer ARGS`: a drop-in for `pretrain_gpt.py` in one simulated rank."""

from __future__ import annotations

import os
import sys

from mindspeed_dryrun.bootstrap import progress
from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.trainer import adapt
from mindspeed_dryrun.trainer import settings as settings_module


def main(args: list[str]) -> None:
    """Runs the iterations the arguments ask for; the engine prints the memory block when the process ends."""
    settings = settings_module.read(args, int(os.environ.get("RANK_ID", "0")), int(os.environ.get("MS_WORKER_NUM", "1")))
    progress.phase("importing")
    adapt.before_import()
    import torch

    adapt.after_import()
    from mindspeed_dryrun.trainer import layers, loop, model, optimizer, parallel

    layers.install(settings)
    parallel.initialize(settings)
    progress.phase("building")
    chunks = model.build(settings)
    loop.train(settings, chunks, optimizer.build(settings, chunks, model.params_dtype(settings)))
    progress.phase("finished")
    del torch


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except DryRunError as error:
        sys.exit(f"mindspeed-dryrun: {error}")
