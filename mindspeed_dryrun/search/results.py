"""What a search leaves behind: table, strategy.json, a script with the strategy set, conversion arguments, a page."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_dryrun.devices.hardware import Hardware
from mindspeed_dryrun.estimate import volumes
from mindspeed_dryrun.estimate.strategy import Strategy
from mindspeed_dryrun.estimate.time_model import Estimate, estimate, trust
from mindspeed_dryrun.files import write_output, write_text
from mindspeed_dryrun.language import message, t
from mindspeed_dryrun.megatron.model_shape import ModelShape
from mindspeed_dryrun.record.store import write_json
from mindspeed_dryrun.report import strategy_page as page
from mindspeed_dryrun.report.text import duration, table
from mindspeed_dryrun.report.view import Headline
from mindspeed_dryrun.search.search import Candidate, SearchResult
from mindspeed_dryrun.search.search_file import SearchPlan
from mindspeed_dryrun.search.written_script import write_script
from mindspeed_dryrun.units import format_mb

# History of strategy.json:
# 1: first version; `galvatron` has the field names of Galvatron's own result.
# 2: `communication`: by stage, in MB, what the engine lists and what the time model counts on.
# 3: `recomputed_layers_per_stage`.
# 4: `ep`, `expert_tp`, `dispatcher`, `ulysses_degree`, `schedule`, `options`.
SCHEMA_VERSION = 4
# A chart with every candidate of a large space would only be slow.
_MOST_POINTS = 400


def header_and_rows(result: SearchResult, shape: ModelShape, hardware: Hardware) -> tuple[list[str], list[list[str]]]:
    """The winners with figures."""
    header = ["rank", "strategy", "peak", "margin", "s/iteration", "tokens/s/card", "TFLOP/s/card", "bubble", "communication"]
    rows = []
    for index, winner in enumerate(result.winners, 1):
        guess = estimate(shape, winner.strategy, hardware, operators=winner.operators)
        assert winner.measurement is not None
        peak = winner.measurement.actual_mb
        rows.append(
            [
                str(index),
                winner.strategy.name,
                f"{peak}M",
                f"{100 * (1 - peak / result.budget_mb):.1f}%",
                f"{guess.iteration_s:.2f} ({guess.low_s:.1f}-{guess.high_s:.1f})",
                f"{guess.tokens_per_s / winner.strategy.world:.0f}",
                f"{guess.tflops_per_card:.0f}",
                f"{100 * guess.bubble_share:.1f}%",
                f"{100 * guess.communication_share:.1f}%",
            ]
        )
    return header, rows


def to_text(result: SearchResult, shape: ModelShape, hardware: Hardware) -> str:
    """What the command prints."""
    header, rows = header_and_rows(result, shape, hardware)
    lines = [table(header, rows, left=2)] if rows else []
    lines += summary_lines(result, shape, hardware)
    lines += [communication_line(result.winners[0], shape)] if rows else []
    if not rows:
        lines.append(t(nothing_fits(result)))
    return "\n".join(lines)


def summary_lines(result: SearchResult, shape: ModelShape, hardware: Hardware) -> list[str]:
    """Counts, cost, and how far the figures can be trusted."""
    lines = [
        t(
            f"{result.considered} strategies considered, {result.struck_out} struck out by the lower bound, "
            f"{result.predicted} predicted, {result.passed_over} passed over by prediction, {result.probes} small and "
            f"{result.dry_runs} full dry runs ({result.ranks_run} ranks) in {duration(result.seconds)}."
        ),
        t(
            f"Memory is counted by dry run; the fit behind the choice is off by {100 * result.residual_median:.2f}% "
            f"(median) and {100 * result.residual_worst:.2f}% (worst)."
        ),
    ]
    doubt = "" if hardware.error is not None else t(": the order is meant, not the seconds")
    if result.winners and (best := result.winners[0].measurement) and best.outside_mb:
        left = hardware.total_mb - best.actual_mb
        lines.append(
            t(f"Communicators of the best take {best.outside_mb}M outside the pool; the card has {left}M left for them.")
        )
    if shown := result.winners or result.candidates:
        trusted = t(trust(shape, shown[0].strategy, hardware))
        lines.append(t(f"Times are predicted for {hardware.name}, {trusted}{doubt}."))
    for candidate in result.failed:
        error = candidate.measurement.error if candidate.measurement else None
        lines.append(t(f"{candidate.strategy.name} could not be dry-run: {error}"))
    for reason, count in result.refused.items():
        lines.append(t(f"{count} strategies were left out, the trainer would not start: {reason}"))
    if result.stopped:
        lines.append(t(f"Stopped early: {result.stopped}"))
    if result.interrupted:
        lines.append(t("Interrupted: these are the results so far. The same --out continues."))
    return lines


def communication(winner: Candidate, shape: ModelShape) -> list[dict[str, Any]]:
    """By stage, in MB: what the engine lists in the winner's dry run, and what its predicted time counts on."""
    if winner.measurement is None or winner.measurement.record is None:
        return []
    strategy, overlapped = winner.strategy, winner.operators.overlapped_gather
    found = volumes.listed(Path(winner.measurement.record), strategy)
    return [
        {
            "stage": stage,
            "engine_mb": _megabytes(seen),
            "model_mb": _megabytes(volumes.counted(shape, strategy, stage, overlapped)),
        }
        for stage, seen in sorted(found.items())
    ]


def _megabytes(seen: volumes.Volumes) -> dict[str, float]:
    return {name: round(value / 2**20, 1) for name, value in dataclasses.asdict(seen).items()}


_PART_SENTENCES = {
    "tensor": "tensor parallelism, a microbatch",
    "context": "context parallelism, a microbatch",
    "data": "gradients and weights, an iteration",
    "experts": "tokens to their experts and back, a microbatch",
}


def communication_line(winner: Candidate, shape: ModelShape) -> str:
    """The engine's list of collectives against the volumes behind the predicted time."""
    strategy = winner.strategy
    if strategy.tp * strategy.dp * strategy.cp == 1:
        return t("Communication of the best: between neighbouring stages only.")
    stages = communication(winner, shape)
    if not stages:
        return t("Communication was counted from the model's shape; the dry run left no list of collectives.")
    shown, worst = [], 0.0
    for name in volumes.checked_parts(strategy):
        what = _PART_SENTENCES[name]
        pairs = [(stage["engine_mb"][name], stage["model_mb"][name]) for stage in stages]
        engine, model = max(pairs)
        if engine:
            shown.append(t(f"{engine:.0f}M ({t(what)}; the time model counts {model:.0f}M)"))
        worst = max(worst, *(abs(seen - counted) / max(seen, counted, 1.0) for seen, counted in pairs))
    text = t(f"Communication of the best, listed by the engine: {', '.join(shown) or t('none')}.")
    if worst < 0.05:
        return text
    return text + t(f" They differ by up to {100 * worst:.0f}%: the predicted time may be off by as much.")


def nothing_fits(result: SearchResult) -> str:
    """An impossible budget: the closest strategy and what it misses."""
    if result.interrupted:
        return message("No strategy was verified before the interruption.")
    if result.least_bound is not None:
        name, bound = result.least_bound
        return message(
            f"No strategy fits {format_mb(result.budget_mb)}: the closest, {name}, holds at least {format_mb(bound)} of "
            f"weights, gradients, optimizer states and activations, {bound - result.budget_mb:.0f}M too much. "
            "Use more cards, a larger budget, or allow more recomputation or the distributed optimizer."
        )
    closest = result.closest
    if closest is None or closest.measurement is None or not closest.measurement.stages:
        error = closest.measurement.error if closest and closest.measurement else "nothing could be dry-run"
        return message(f"No strategy could be verified: {error}")
    peak = closest.measurement.actual_mb
    return message(
        f"No strategy fits {format_mb(result.budget_mb)}: the closest, {closest.strategy.name}, needs {format_mb(peak)}, "
        f"{peak - result.budget_mb}M too much. Use more cards, a larger budget, or widen the space (recompute, vpp, "
        "distributed_optimizer, cp)."
    )


def _strategy_fields(strategy: Strategy) -> dict[str, Any]:
    return {
        "world_size": strategy.world,
        "tp": strategy.tp,
        "pp": strategy.pp,
        "dp": strategy.dp,
        "cp": strategy.cp,
        "cp_algorithm": strategy.cp_algorithm if strategy.cp > 1 else None,
        "ulysses_degree": strategy.heads_exchanged if strategy.cp > 1 else None,
        "ep": strategy.ep if strategy.etp else None,
        "expert_tp": strategy.etp or None,
        "dispatcher": strategy.dispatcher or None,
        "schedule": "dualpipev" if strategy.dualpipe else "interleaved" if strategy.chunks > 1 else "1f1b",
        "options": list(strategy.options),
        "vpp": strategy.chunks if strategy.chunks > 1 else None,
        "layers_per_stage": [list(stage) for stage in strategy.stages],
        "noop_layers": list(strategy.noop_layers),
        "micro_batch": strategy.micro_batch,
        "recompute": str(strategy.recompute),
        "recomputed_layers_per_stage": [list(strategy.recomputed(stage)) for stage in range(strategy.pp)],
        "sequence_parallel": strategy.sequence_parallel and strategy.tp > 1,
        "distributed_optimizer": strategy.distributed_optimizer,
    }


def strategy_json(winner: Candidate, shape: ModelShape, guess: Estimate, budget_mb: int) -> dict[str, Any]:
    """One winner: ours, Galvatron's fields, the arguments and the conversion's."""
    strategy = winner.strategy
    measurement = winner.measurement
    return {
        "schema_version": SCHEMA_VERSION,
        "name": strategy.name,
        "strategy": _strategy_fields(strategy),
        "galvatron": galvatron_fields(strategy, shape),
        "memory": {
            "budget_mb": budget_mb,
            "used_peak_mb": measurement.used_mb if measurement and measurement.stages else None,
            "actual_peak_mb": measurement.actual_mb if measurement and measurement.stages else None,
            "outside_pool_mb": measurement.outside_mb if measurement and measurement.stages else None,
            "stages": [dataclasses.asdict(peak) for peak in measurement.stages.values()] if measurement else [],
        },
        "communication": communication(winner, shape),
        "predicted": guess.figures(),
        "trainer_args": list(strategy.arguments()),
        "conversion_args": list(strategy.conversion_arguments()),
    }


def galvatron_fields(strategy: Strategy, shape: ModelShape) -> dict[str, Any]:
    """The fields of Galvatron's `fine_grained_config.json`: one entry a layer, joined by commas."""
    recomputed = []
    for chunk in range(strategy.chunks):
        for stage, held in enumerate(strategy.stages):
            again = strategy.recomputed(stage)[chunk]
            recomputed += [1] * again + [0] * (held[chunk] - again)
    layers = strategy.layers
    return {
        "pp_size": strategy.pp,
        "tp_size_list": ",".join([str(strategy.tp)] * layers),
        "dp_size_list": ",".join([str(strategy.dp)] * layers),
        "recompute_list": ",".join(map(str, recomputed)),
        "gradient_accumulation_steps": strategy.microbatches(shape.global_batch),
        "global_batch_size": shape.global_batch,
        "per_device_train_batch_size": strategy.micro_batch,
    }


def write_results(
    folder: Path, result: SearchResult, shape: ModelShape, hardware: Hardware, plan: SearchPlan, trace: Path | None = None
) -> list[Path]:
    """Everything a user takes along; returns what was written."""
    written = [folder / "search.html"]
    folder.mkdir(parents=True, exist_ok=True)
    write_text(written[0], to_html(result, shape, hardware, plan.script.name))
    if not result.winners:
        return written
    best = result.winners[0]
    guess = estimate(shape, best.strategy, hardware, operators=best.operators)
    data = strategy_json(best, shape, guess, result.budget_mb)
    data["others"] = [
        strategy_json(other, shape, estimate(shape, other.strategy, hardware, operators=other.operators), result.budget_mb)
        for other in result.winners[1:]
    ]
    write_json(folder / "strategy.json", data)
    target = folder / plan.script.name
    write_script(target, plan.script, best.strategy, plan.cards_per_node, plan.sets, plan.args)
    write_text(folder / "convert_args.txt", " ".join(best.strategy.conversion_arguments()) + "\n")
    written += [folder / "strategy.json", target, folder / "convert_args.txt"]
    if trace is not None:
        from mindspeed_dryrun.estimate import timeline

        trace.parent.mkdir(parents=True, exist_ok=True)
        write_output(trace, json.dumps(timeline.trace(shape, best.strategy, hardware, best.operators)) + "\n")
        written.append(trace)
    return written


def points(result: SearchResult, shape: ModelShape, hardware: Hardware) -> list[page.Point]:
    """Every candidate whose memory is known or predicted, the fastest first, up to a few hundred."""
    winners = {id(winner) for winner in result.winners}
    known = [item for item in result.candidates if item.measurement or item.prediction]
    shown = [item for item in known if item.measurement] + [item for item in known if not item.measurement]
    found = []
    for item in shown[:_MOST_POINTS]:
        rate = shape.global_batch * shape.seq / item.seconds / item.strategy.world
        if item.measurement and item.measurement.stages:
            memory: float = item.measurement.actual_mb
            kind = "winner" if id(item) in winners else "verified" if memory <= result.budget_mb else "over"
        elif item.prediction:
            memory, kind = item.prediction.actual_mb, "predicted"
        else:
            continue
        found.append(page.Point(item.strategy.name, memory, rate, kind))
    return found


def stage_table(best: Candidate, shape: ModelShape) -> page.Table:
    """The best strategy, stage by stage."""
    strategy, measured = best.strategy, best.measurement
    microbatches = strategy.microbatches(shape.global_batch)
    rows = [
        [
            stage,
            _chunks(layers),
            _chunks(strategy.recomputed(stage)),
            _chunks(strategy.in_flight(stage, microbatches)),
            *([f"{peak.used_mb}M", f"{peak.actual_mb}M"] if measured and (peak := measured.stages.get(stage)) else ["-", "-"]),
        ]
        for stage, layers in enumerate(strategy.stages)
    ]
    return page.Table(["stage", "layers", "recomputed", "microbatches held", "used", "with fragments"], rows)


def _chunks(numbers: Sequence[float]) -> str:
    return " + ".join(f"{number:g}" for number in numbers)


def to_html(result: SearchResult, shape: ModelShape, hardware: Hardware, script: str) -> str:
    """The page: verdict, winners, chart, what to run."""
    header, rows = header_and_rows(result, shape, hardware)
    sections = []
    if rows:
        sections.append(
            page.PageSection(title="Winners, each verified by dry run", table=page.Table(header, rows, left=2), text=[_NAMES])
        )
        budget = t(f" Budget {format_mb(result.budget_mb)} a card.")
        verdict = Headline(t("FOUND"), "good", t(found_sentence(result)) + budget)
    else:
        word = t("INTERRUPTED" if result.interrupted else "NOTHING FITS")
        verdict = Headline(word, "warn" if result.interrupted else "bad", t(nothing_fits(result)))
    shown = points(result, shape, hardware)
    if shown:
        sections.append(
            page.PageSection(
                title="Throughput over memory",
                plot=page.plot(shown, result.budget_mb, "tokens/s/card"),
                text=["The line is the Pareto front. Throughput is predicted; memory of the small dots too."],
            )
        )
    if result.winners:
        best = result.winners[0]
        sections += [
            page.PageSection(title="The best strategy, by stage", table=stage_table(best, shape)),
            page.PageSection(title="Its trainer arguments", code=[shlex.join(best.strategy.arguments())]),
            page.PageSection(
                title="Arguments of the weight conversion, which must agree",
                code=[shlex.join(best.strategy.conversion_arguments())],
            ),
        ]
    sections.append(page.PageSection(title="What it took", text=summary_lines(result, shape, hardware)))
    return page.render(t(f"Search for {script}"), verdict, sections)


def found_sentence(result: SearchResult) -> str:
    """The best in one sentence."""
    best = result.winners[0]
    assert best.measurement is not None
    peak = best.measurement.actual_mb
    return message(f"{best.strategy.name} needs {peak}M on its worst rank, {result.budget_mb - peak}M below the budget.")


_NAMES = (
    "TP, PP, DP, CP: tensor, pipeline, data and context parallel size (u: Ulysses, h2: hybrid, 2 of them exchange heads). "
    "EP: ranks that experts are spread over, ETP: ranks that share one, then how tokens reach them. MBS: micro batch. "
    "VPP: chunks of a stage. […]: layers of each stage. full, selective, block-N, stage-N: recomputation, of N layers of each "
    "chunk or of each stage; block-2,1,0x6: 2 of the first stage, 1 of the second, none of the other 6. DO: distributed "
    "optimizer."
)
