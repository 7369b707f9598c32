"""`python -m mindspeed_dryrun.rank PROGRAM ARGS…`: one rank. Checks, patches, then runs PROGRAM as `__main__`."""

from __future__ import annotations

import sys

from mindspeed_dryrun.rank.leave import run_and_leave
from mindspeed_dryrun.rank.worker import main

if __name__ == "__main__":
    run_and_leave(lambda: main(sys.argv[1:]))
