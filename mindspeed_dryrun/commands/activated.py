"""What `msrun` and `torchrun` are in an activated shell: the dry run of this very call, with the options given to `activate`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mindspeed_dryrun.commands import launch, status_of
from mindspeed_dryrun.language import set_language
from mindspeed_dryrun.launch.job import understand
from mindspeed_dryrun.launch.read_call import read_call
from mindspeed_dryrun.rank import activation as config


def main(argv: Sequence[str]) -> int:
    """LAUNCHER ARGS…: runs the ranks of this call in simulation and prints the summary; the status is launch's."""
    set_language(None)
    return status_of(lambda: _run(argv))


def _run(argv: Sequence[str]) -> int:
    activation = config.current()
    env = {name: value for name, value in os.environ.items() if name != config.VARIABLE}
    call = read_call(argv[0], argv[1:], str(Path.cwd()), env)
    job = understand(call, activation.script or f"{call.launcher} {call.program}")
    args = launch.parser().parse_args(["-", *activation.options])
    return launch.run_job(job, Path(args.out or f"dryrun-{Path(call.program).stem}"), args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
