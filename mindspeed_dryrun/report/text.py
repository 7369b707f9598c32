"""Plain tables, and progress on standard error: standard output stays for results."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> str:
    """Columns as wide as their widest cell; the first `left` are flush left, figures flush right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[index]) for row in [list(header), *cells]) for index in range(len(header))]

    def line(row: Sequence[str]) -> str:
        parts = [
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(parts).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, cells)])


def duration(seconds: float) -> str:
    """`8 s`, `3 min 20 s`, `1 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def say(text: str) -> None:
    """One line of progress."""
    print(text, file=sys.stderr, flush=True)
