"""Plain tables, and progress on standard error: standard output stays for results."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from mindspeed_dryrun.language import t, width


def columns(head: Sequence[str], body: Sequence[Sequence[str]], left: Iterable[int] = ()) -> list[str]:
    """Aligned columns, two spaces apart; numbers to the right except the columns named in `left`."""
    lefts, head = set(left), [t(name) for name in head]
    widths = [max(width(row[i]) for row in [head, *body]) for i in range(len(head))]
    return [
        "  ".join(
            cell + " " * (wide - width(cell)) if i in lefts else " " * (wide - width(cell)) + cell
            for i, (cell, wide) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [head, *body]
    ]


def table(header: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> str:
    """The same with a line under the header; the first `left` columns are flush left."""
    cells, header = [[str(cell) for cell in row] for row in rows], [t(name) for name in header]
    head, *body = columns(header, cells, range(left))
    widths = [max(width(row[index]) for row in [header, *cells]) for index in range(len(header))]
    return "\n".join([head, "  ".join("-" * wide for wide in widths), *body])


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
