"""`python -m mindspeed_dryrun VERB` is the same program as `mindspeed-dryrun VERB`."""

import sys

from mindspeed_dryrun.commands import main

if __name__ == "__main__":
    sys.exit(main())
