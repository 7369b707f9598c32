"""Lists the operators of CANN whose workspace a dry run with torch_npu counts, and by which public source each.

python benchmarks/workspace_page.py > docs/workspace.md
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from mindspeed_dryrun.rank.torch_npu import answers, atb, workspace

INTRODUCTION = """\
# Workspace of operators on torch_npu

An operator of CANN asks for memory while it runs. torch_npu takes it from its caching allocator, so that it is part of the
peak; with TASK_QUEUE_ENABLE=2 it takes it from elsewhere, and it is not. A dry run has no CANN to ask. It counts what the
public host code of CANN 8.5.0 says for an Ascend 910B, as formulas of shapes, types and the cores of the card: 24 cube cores and
48 vector cores, or those of the card that `--device` names (an Ascend 910B3 has 20 and 40). None is fitted to a measured figure
([real_npu.md](real_npu.md) compares); each has a test in `tests/unit/test_torch_workspace.py`.

Files are below hicann/ops-nn, ops-math or ops-transformer on GitCode; those of NNAL below hicann/ascend-transformer-boost.
Inner tensors and the kernels' own share are laid out as hicann/opbase does (`memory_allocator.cpp`): two share a place where
one is over before the other begins, and never with an input of the operator that makes it.

A report names the operators that a rank used and that are not in this table: their workspace counts as nothing. Of those
whose workspace grows with their inputs it says how much room there was below the peak.
"""


def page() -> str:
    """The page, a row for each formula."""
    rows: dict[Callable[..., int], list[str]] = {}
    for operator, formula in sorted(workspace.formulas.items()):
        rows.setdefault(formula, []).append(operator)
    for operator, (_, formula) in sorted(atb.FORMULAS.items()):
        rows.setdefault(formula, []).append(operator)
    lines = [
        INTRODUCTION,
        f"{sum(map(len, rows.values()))} operators:",
        "",
        "| operators | public source, and what it asks for |",
        "|---|---|",
    ]
    for formula, operators in sorted(rows.items(), key=lambda row: (inspect.getmodule(row[0]).__name__, row[1])):  # type: ignore[union-attr]
        source = " ".join(inspect.getdoc(formula).split())  # type: ignore[union-attr]
        lines.append(f"| {', '.join(operators)} | {source.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    assert answers.names()  # every module with a formula is loaded
    print(page(), end="")
