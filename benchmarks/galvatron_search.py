"""Our search and Galvatron's on the same tables: memory by the analytic count of `bound`, time by the time model."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import galvatron
from galvatron import LayerStrategy, Tables

from mindspeed_dryrun.devices.hardware import Hardware
from mindspeed_dryrun.estimate.layer_time import Case, gather_seconds, layer_time
from mindspeed_dryrun.estimate.lower_bound import lower_bound_mb, saved_mb, stage_bound_mb, state_mb
from mindspeed_dryrun.estimate.strategy import Recompute, Strategy
from mindspeed_dryrun.estimate.time_model import USUAL, end_of_iteration, iteration_seconds, stage_extras
from mindspeed_dryrun.megatron.model_shape import ModelShape
from mindspeed_dryrun.search.balance import balanced
from mindspeed_dryrun.search.space import Space, strategies


@dataclass(frozen=True)
class Comparison:
    """Both winners under the same model. `plan` is Galvatron's own, layer by layer, and `plan_s` the time it would take if
    it could be trained so; `theirs` is what Megatron makes of it."""

    ours: Strategy | None
    ours_s: float
    ours_fits: bool
    plan: galvatron.Plan | None
    plan_s: float
    theirs: Strategy | None
    theirs_s: float
    theirs_fits: bool


def compare(
    shape: ModelShape, world: int, budget_mb: int, hardware: Hardware, micro_batch: tuple[int, ...] = (1, 2)
) -> Comparison:
    """Searches twice over tensor, pipeline and data parallel sizes, micro batch and recomputation."""
    space = Space(micro_batch=micro_batch)
    listed = strategies(shape, world, space)
    stage_mb = functools.partial(stage_bound_mb, shape)
    for layout in dict.fromkeys(item.layout for item in listed if item.chunks == 1 and item.pp > 1):
        listed += balanced(layout, stage_mb, budget_mb, budget_mb)
    fitting = [item for item in listed if lower_bound_mb(shape, item) <= budget_mb]
    ours = min(fitting, key=lambda item: iteration_seconds(shape, item, hardware), default=None)
    plan = galvatron.search(_tables(shape, world, budget_mb, hardware, space))
    theirs, plan_s = None, float("inf")
    if plan is not None:
        tp, pp, dp, micro, again = galvatron.as_trained(plan)
        even = ((shape.layers // pp,),) * pp
        theirs = Strategy(
            tp=tp,
            pp=pp,
            dp=dp,
            cp=1,
            micro_batch=micro,
            stages=even,
            recompute=Recompute("full", 1) if again else Recompute(),
            sequence_parallel=tp > 1,
            distributed_optimizer=dp > 1,
        )
        # What its recurrence leaves out, at the cheapest of its layers' layouts.
        layouts = {(layer.tp, layer.dp) for layer in plan.layers}
        plan_s = plan.seconds + min(
            sum(
                end_of_iteration(
                    Case(shape, dataclasses.replace(theirs, tp=tp, dp=dp, distributed_optimizer=dp > 1), hardware, USUAL), 0.0
                )
            )
            for tp, dp in layouts
        )
    return Comparison(
        ours=ours,
        ours_s=iteration_seconds(shape, ours, hardware) if ours else float("inf"),
        ours_fits=ours is not None and lower_bound_mb(shape, ours) <= budget_mb,
        plan=plan,
        plan_s=plan_s,
        theirs=theirs,
        theirs_s=iteration_seconds(shape, theirs, hardware) if theirs else float("inf"),
        theirs_fits=theirs is not None and lower_bound_mb(shape, theirs) <= budget_mb,
    )


def _tables(shape: ModelShape, world: int, budget_mb: int, hardware: Hardware, space: Space) -> Tables:
    """One layer's share of the models. Galvatron shards the states over data parallel ranks, as ZeRO does."""

    def single(choice: LayerStrategy, micro_batch: int) -> Strategy:
        recompute = Recompute("full", 1) if choice.recompute else Recompute()
        return Strategy(
            tp=choice.tp, pp=1, dp=choice.dp, cp=1, micro_batch=micro_batch, stages=((1,),), recompute=recompute, sequence_parallel=choice.tp > 1, distributed_optimizer=choice.dp > 1
        )  # fmt: skip

    def layer_mb(choice: LayerStrategy, micro_batch: int, in_flight: int) -> float:
        one = single(choice, micro_batch)
        empty = Strategy(
            tp=one.tp,
            pp=1,
            dp=one.dp,
            cp=1,
            micro_batch=micro_batch,
            stages=((0,),),
            recompute=one.recompute,
            sequence_parallel=one.sequence_parallel,
            distributed_optimizer=choice.dp > 1,
        )
        states = state_mb(shape, one, 0) - state_mb(shape, empty, 0)
        return states + in_flight * saved_mb(shape, one, 0)

    def fixed_mb(stage: int, pp: int, tp: int, dp: int, micro_batch: int) -> float:
        bare = Strategy(
            tp=tp,
            pp=pp,
            dp=dp,
            cp=1,
            micro_batch=micro_batch,
            stages=((0,),) * pp,
            recompute=Recompute(),
            sequence_parallel=tp > 1,
            distributed_optimizer=dp > 1,
        )
        return state_mb(shape, bare, stage)

    def layer_s(choice: LayerStrategy, micro_batch: int) -> float:
        layer = layer_time(Case(shape, single(choice, micro_batch), hardware, USUAL), mixture=False)
        return (layer.forward + layer.backward).total + (layer.forward.total if choice.recompute else 0.0)

    def fixed_s(stage: int, pp: int, tp: int, micro_batch: int) -> float:
        bare = Strategy(
            tp=tp,
            pp=pp,
            dp=max(1, world // pp // tp),
            cp=1,
            micro_batch=micro_batch,
            stages=((0,),) * pp,
            recompute=Recompute(),
            sequence_parallel=tp > 1,
        )
        return stage_extras(Case(shape, bare, hardware, USUAL), stage).total

    def change_s(one: LayerStrategy, other: LayerStrategy, micro_batch: int) -> float:
        if one.tp == other.tp:
            return 0.0
        return 2 * gather_seconds(micro_batch * shape.seq * shape.hidden * 2.0, max(one.tp, other.tp), 1, hardware)

    listed = strategies(shape, world, space)
    return Tables(
        world=world,
        layers=shape.layers,
        global_batch=shape.global_batch,
        budget_mb=budget_mb,
        tp=tuple(sorted({item.tp for item in listed})),
        pp=tuple(sorted({item.pp for item in listed})),
        micro_batch=space.micro_batch,
        layer_mb=layer_mb,
        fixed_mb=fixed_mb,
        layer_s=layer_s,
        fixed_s=fixed_s,
        change_s=change_s,
    )
