"""`python -m mindspeed_dryrun VERB` is the same program as `mindspeed-dryrun VERB`."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found, unused-ignore]  # `signal` is an import long enough to be interrupted
import sys

# Ctrl-C while modules are imported: nothing has been done yet, and nobody needs the traceback of an import.
if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)


def main(argv: list[str] | None = None) -> int:
    """The command line, imported late."""
    from mindspeed_dryrun.commands import main as run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
