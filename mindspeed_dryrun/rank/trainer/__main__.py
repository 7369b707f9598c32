"""`python -m mindspeed_dryrun.rank.trainer ARGS`: a drop-in for `pretrain_gpt.py` in one simulated rank."""

from __future__ import annotations

import os
import sys

from mindspeed_dryrun.megatron import settings as settings_module
from mindspeed_dryrun.rank import progress
from mindspeed_dryrun.rank.trainer import imports


def main(args: list[str]) -> None:
    """Runs the iterations the arguments ask for; the engine prints the memory block when the process ends."""
    settings = settings_module.read(args, int(os.environ.get("RANK_ID", "0")), int(os.environ.get("MS_WORKER_NUM", "1")))
    progress.phase("importing")
    imports.load()
    from mindspeed_dryrun.rank.trainer import layers, loop, model, optimizer, tuning
    from mindspeed_dryrun.rank.trainer import process_groups as parallel

    settings = tuning.of_told_length(settings)
    layers.install(settings)
    parallel.initialize(settings)
    progress.phase("building")
    chunks = model.build(settings)
    states = optimizer.build(settings, chunks, model.params_dtype(settings))
    loop.train(settings, chunks, states, model.build_frozen(settings) if settings.stage == "dpo" else None)
    progress.phase("finished")


if __name__ == "__main__":
    main(sys.argv[1:])
