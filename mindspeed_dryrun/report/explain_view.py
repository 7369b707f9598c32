"""An explanation as text of 80 columns or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mindspeed_dryrun.language import message, t
from mindspeed_dryrun.report import view
from mindspeed_dryrun.report.explain import Explanation, Part
from mindspeed_dryrun.report.text import columns

_BAR = 24


def render_text(found: Explanation, most: int = 12) -> str:
    """Categories, then where the activations are, then the largest tensors."""
    title = t("The peak" if found.rank is None else f"Rank {found.rank} at its peak")
    lines = [t("{title}: {size} used, {when}", title=title, size=_mb(found.peak_bytes), when=found.when), ""]
    lines += _category_lines(found)
    if found.parameters and found.bytes_per_parameter:
        lines += [
            "",
            t(
                f"{found.parameters} parameters: weights + gradients + optimizer = {_mb(found.static_bytes)}"
                f" = {found.bytes_per_parameter:.2f} bytes each"
            ),
        ]
    lines += _section(message("Activations by microbatch"), found.microbatches, found.peak_bytes, most, message("microbatch {}"))
    lines += _section(message("Activations by layer (of this rank)"), found.layers, found.peak_bytes, 40, message("layer {}"))
    lines += _section(message("Activations by operator"), found.operators, found.peak_bytes, most)
    lines += _section(message("Temporary"), found.temporaries, found.peak_bytes, most)
    lines += _section(message("Communication and other"), found.others, found.peak_bytes, most)
    lines += ["", t("Largest tensors at the peak"), *_tensor_lines(found, most)]
    if found.damaged_rows:
        lines += ["", t("{rows} of the file left out.", rows=view.plural(found.damaged_rows, "damaged row"))]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def to_json(found: Explanation) -> dict[str, Any]:
    """Everything in bytes; `sum_bytes` plus `difference_mb` is the engine's figure."""

    def parts(items: Sequence[Part]) -> list[dict[str, Any]]:
        return [{"name": item.name, "bytes": item.size_bytes, "blocks": item.blocks} for item in items]

    return {
        "rank": found.rank,
        "file": str(found.path),
        "peak_bytes": found.peak_bytes,
        "phase": found.peak_segment.phase,
        "microbatch": found.peak_segment.microbatch,
        "iteration": found.peak_segment.iteration,
        "categories": {part.name: part.size_bytes for part in found.categories},
        "engine_used_mb": found.engine_used_mb,
        "engine_actual_mb": found.engine_actual_mb,
        "difference_mb": found.difference_mb,
        "fragments_bytes": found.fragments_bytes,
        "parameters": found.parameters,
        "bytes_per_parameter": found.bytes_per_parameter,
        "activations_by_microbatch": parts(found.microbatches),
        "activations_by_layer": parts(found.layers),
        "activations_by_operator": parts(found.operators),
        "temporaries": parts(found.temporaries),
        "segments": [
            {"phase": item.phase, "microbatch": item.microbatch, "peak_bytes": item.peak_bytes}
            for item in found.iteration.segments
        ],
        "tensors": [
            {
                "bytes": item.size_bytes,
                "blocks": item.blocks,
                "category": item.category,
                "operator": item.operator,
                "layers": list(item.layers),
                "microbatches": list(item.microbatches),
                "place": item.place,
                "shape": str(item.shape) if item.shape else None,
            }
            for item in found.tensors
        ],
    }


def render_json(found: Sequence[Explanation]) -> str:
    """`{"schema_version": 1, "ranks": […]}`."""
    return json.dumps({"schema_version": 1, "ranks": [to_json(item) for item in found]}, indent=2) + "\n"


def _mb(size: float) -> str:
    return f"{size / 2**20:.1f}M"


def _category_lines(found: Explanation) -> list[str]:
    body = []
    for part in found.categories:
        bar = "█" * round(_BAR * part.size_bytes / found.peak_bytes)
        body.append([t(part.name), _mb(part.size_bytes), view.percent(part.size_bytes, found.peak_bytes), bar])
    body.append([t("sum"), _mb(found.peak_bytes), "", ""])
    if found.engine_used_mb is not None:
        body.append([t("difference from the engine's figure"), f"{found.difference_mb:+d}M", "", ""])
        body.append([t("used peak (engine)"), f"{found.engine_used_mb}M", "", ""])
    elif found.difference_mb:
        body.append([t("difference from the file's own count"), f"{found.difference_mb:+d}M", "", ""])
    if found.fragments_bytes is not None:
        used = found.engine_used_mb if found.engine_used_mb is not None else found.peak_bytes / 2**20
        body.append([t("fragments"), _mb(found.fragments_bytes), "", ""])
        body.append([t("with fragments"), f"{used + found.fragments_bytes / 2**20:.1f}M", "", ""])
    return columns(["category", "at the peak", "share", ""], body, left=(0, 3))


def _section(title: str, parts: Sequence[Part], peak: int, most: int, numbered: str = "{}") -> list[str]:
    shown = [part for part in parts if part.size_bytes >= 2**20][:most]
    if not shown:
        return []
    body = [
        [
            view.shorten(t(view.clean(numbered.format(part.name) if part.name.isdigit() else part.name)), 48),
            _mb(part.size_bytes),
            view.percent(part.size_bytes, peak),
            str(part.blocks),
        ]
        for part in shown
    ]
    rest = [part for part in parts if part not in shown]
    if rest:
        size = sum(part.size_bytes for part in rest)
        body.append([t(f"{len(rest)} more"), _mb(size), view.percent(size, peak), str(sum(part.blocks for part in rest))])
    return ["", *columns([title, "size", "share", "blocks"], body, left=(0,))]


def _tensor_lines(found: Explanation, most: int) -> list[str]:
    lines = []
    for item in found.tensors[:most]:
        where = t(", layers {layers}", layers=view.ranges(item.layers)) if len(item.layers) > 1 else ""
        where = t(", layer {layer}", layer=item.layers[0]) if len(item.layers) == 1 else where
        shape = f" {item.shape}" if item.shape else ""
        times = t(" in {blocks} blocks", blocks=item.blocks) if item.blocks > 1 else ""
        head = f"{_mb(item.size_bytes):>8}{times}  {t(item.category)}: {view.clean(item.operator)}{shape}{where}"
        lines += [view.shorten(head, 80), view.shorten(f"          {view.clean(item.place)}", 80)]
    return lines
