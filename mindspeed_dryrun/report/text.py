"""Plain tables, and progress on standard error: standard output stays for results."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from mindspeed_dryrun.language import padded, t, width


def columns(head: Sequence[str], body: Sequence[Sequence[str]], left: Iterable[int] = (), underlined: bool = False) -> list[str]:
    """Aligned columns, two spaces apart; numbers to the right except the columns named in `left`."""
    lefts, rows = set(left), [[t(name) for name in head], *body]
    widths = [max(width(row[i]) for row in rows) for i in range(len(head))]
    if underlined:
        rows.insert(1, ["-" * wide for wide in widths])
    return [
        "  ".join(
            padded(cell, wide) if i in lefts else " " * (wide - width(cell)) + cell
            for i, (cell, wide) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def table(header: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> str:
    """The same with a line under the header; the first `left` columns are flush left."""
    return "\n".join(columns(header, [[str(cell) for cell in row] for row in rows], range(left), underlined=True))


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
    print(t(text), file=sys.stderr, flush=True)
