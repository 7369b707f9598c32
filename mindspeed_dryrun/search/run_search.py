"""A search from its file to its results: what the command line and the Python interface share."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.estimate.operators import Operators, read_operators
from mindspeed_dryrun.estimate.strategy import read_dispatcher
from mindspeed_dryrun.launch.executors import SharedPlaces, host
from mindspeed_dryrun.launch.run import Execution
from mindspeed_dryrun.launch.script import capture
from mindspeed_dryrun.megatron.arguments import override_args
from mindspeed_dryrun.megatron.model_shape import ModelShape, read_shape
from mindspeed_dryrun.record.run_spec import RunSpec
from mindspeed_dryrun.search import results
from mindspeed_dryrun.search.measure import DryRuns
from mindspeed_dryrun.search.search import Search, SearchProgress, SearchResult
from mindspeed_dryrun.search.search_file import SearchPlan, read_search
from mindspeed_dryrun.search.space import strategies, why_nothing


@dataclass(frozen=True)
class Prepared:
    """A search that has listed its strategies and has not dry-run any."""

    plan: SearchPlan
    shape: ModelShape
    search: Search
    shared: SharedPlaces | None  # with all dry runs of the search


@dataclass(frozen=True)
class Found:
    """A search that has ended."""

    plan: SearchPlan
    shape: ModelShape
    result: SearchResult
    written: list[Path]


def prepare(
    file: Path,
    folder: Path,
    spec: RunSpec | None = None,
    execution: Execution | None = None,
    on_progress: Callable[[SearchProgress], None] = lambda progress: None,
) -> Prepared:
    """Reads the file and lists its strategies. A budget or a device of `spec` goes before the file's."""
    plan, spec, execution = read_search(file), spec or RunSpec(), execution or Execution(cache=True)
    call = capture(plan.script, plan.sets)
    call = dataclasses.replace(call, program_args=override_args(call.program_args, plan.args))
    words = call.program_args
    shape = read_shape(words)
    listed = strategies(shape, plan.world, plan.space, read_dispatcher(words))
    if not listed:
        raise UsageError(f"{file}: {why_nothing(shape, plan.world, plan.space)}")
    budget_mb = plan.budget_mb if spec.budget_mb is None else spec.budget_mb
    spec = dataclasses.replace(spec, budget_mb=budget_mb)
    if spec.device is None and spec.device_from is None:
        spec = dataclasses.replace(spec, device=plan.device)
    local = execution.executor == "local"
    shared = SharedPlaces(execution.jobs or host.usable_cores(), execution.cold) if local else None
    execution = dataclasses.replace(execution, shared=shared)
    measure = DryRuns(call, str(plan.script), plan.cards_per_node, folder / "runs", spec, execution)

    def variant(options: tuple[str, ...]) -> tuple[ModelShape, Operators]:
        changed = override_args(words, options)
        return read_shape(changed), read_operators(changed)

    search = Search(
        shape, listed, plan.hardware, budget_mb, measure, plan.winners, on_progress, plan.space.per_stage, variant=variant,
        refusal=measure.refusal,
    )  # fmt: skip
    return Prepared(plan, shape, search, shared)


def finish(prepared: Prepared, folder: Path, trace: Path | None = None) -> Found:
    """Runs the search and writes its results."""
    with prepared.shared or contextlib.nullcontext():
        result = prepared.search.run()
    plan, shape = prepared.plan, prepared.shape
    return Found(plan, shape, result, list(results.write_results(folder, result, shape, plan.hardware, plan, trace)))


def run_search(file: Path, folder: Path) -> Found:
    """The whole search with everything as the file says."""
    return finish(prepare(file, folder), folder)
