"""What `msrun` is in an activated shell: the dry run of this very call, with the options given to `activate`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mindspeed_dryrun.bootstrap import config
from mindspeed_dryrun.commands import launch
from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.launch.job import understand
from mindspeed_dryrun.launch.msrun_call import read_msrun_call


def main(argv: Sequence[str]) -> int:
    """Runs the ranks of this msrun call in simulation and prints the summary; the status is launch's."""
    activation = config.current()
    env = {name: value for name, value in os.environ.items() if name != config.VARIABLE}
    try:
        call = read_msrun_call(argv, str(Path.cwd()), env)
        job = understand(call, activation.get("script") or f"msrun {call.program}")
        args = launch.parser().parse_args(["-", *map(str, activation.get("options") or ())])
        return launch.run_job(job, Path(args.out or f"dryrun-{Path(call.program).stem}"), args)
    except DryRunError as error:
        print(f"mindspeed-dryrun: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("mindspeed-dryrun: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
