"""`python -m mindspeed_dryrun.launch SCRIPT`: the front door."""

import sys

from mindspeed_dryrun.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["launch", *sys.argv[1:]]))
