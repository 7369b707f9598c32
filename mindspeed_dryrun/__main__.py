"""`python -m mindspeed_dryrun VERB` is the same program as `mindspeed-dryrun VERB`."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found, unused-ignore]  # `signal` is an import long enough to be interrupted
import sys

# Ctrl-C while modules are imported: nothing has been done yet, and nobody needs the traceback of an import.
if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)


def main(argv: list[str] | None = None) -> int:
    """The command line, imported late."""
    if not (3, 10) <= sys.version_info[:2] <= (3, 11):
        this = ".".join(map(str, sys.version_info[:2]))
        print(
            f"mindspeed-dryrun runs on Python 3.10 and 3.11, and this is Python {this}: its engine is tested on these two only. "
            "Make an environment with one of them: python3.11 -m venv .venv",
            file=sys.stderr,
        )
        return 2
    from mindspeed_dryrun.commands import main as run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
