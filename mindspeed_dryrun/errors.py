"""Errors that are sentences for the person at the keyboard; each carries its exit status."""

from __future__ import annotations


class DryRunError(Exception):
    """Something a user can cause or mend. Printed as one sentence, without a traceback."""

    exit_status = 1


class UsageError(DryRunError):
    """Wrong use: a script, flag, file or value that cannot be what was meant."""

    exit_status = 2
