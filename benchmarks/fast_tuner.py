"""fast-tuner's example (DeepSeek-V3 on 512 dies of Atlas A3, batch 3840) given to our search, under our models.

    python benchmarks/fast_tuner.py [--script examples/experts/deepseek_v3_512p.sh]

fast-tuner (github.com/mindspore-ai/hyper-parallel, hyper_parallel/auto_parallel/fast-tuner) lists DP, TP, CP, PP, EP up to 64, sharding
of the optimizer, chunks, micro batches of 1, 2 and 4 and sequence parallelism (ndsearch/build_initial_spaces.py), and looks
for recomputation afterwards. Here the same choices are a part of our space: the fastest strategy of that part, and the fastest of the
whole space. Memory is the model's first guess, from the shapes alone: no dry run is made.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Collection
from pathlib import Path

from mindspeed_dryrun.devices.hardware import read_hardware
from mindspeed_dryrun.estimate.memory_model import MemoryModel
from mindspeed_dryrun.estimate.operators import read_operators
from mindspeed_dryrun.estimate.strategy import Recompute, Strategy, read_dispatcher, read_strategy
from mindspeed_dryrun.estimate.time_model import iteration_seconds
from mindspeed_dryrun.launch.script import capture
from mindspeed_dryrun.megatron.model_shape import ModelShape, read_shape
from mindspeed_dryrun.record.model import StagePeak
from mindspeed_dryrun.search.measure import Measurement
from mindspeed_dryrun.search.search import Search, SearchResult
from mindspeed_dryrun.search.space import Space, strategies

ROOT = Path(__file__).resolve().parents[1]
_EXPERTS = tuple(ep for ep in range(1, 65) if ep == 1 or ep % 2 == 0)
THEIRS = Space(
    ep=_EXPERTS, micro_batch=(1, 2, 4), vpp=(1, 2, 4), blocks=False, per_stage=False,
    recompute=(Recompute(), Recompute("selective"), Recompute("full", 1)), cp=(1,),
)  # fmt: skip
OURS = Space(micro_batch=(1, 2, 4), vpp=(1, 2, 4), dualpipe=True)


class Guess:
    """The memory model's first guess in place of a dry run."""

    def __init__(self, shape: ModelShape):
        self.model = MemoryModel(shape)

    def __call__(self, strategy: Strategy, stages: Collection[int] | None = None) -> Measurement:
        shape = dataclasses.replace(self.model.shape, layers=strategy.layers)
        found = {}
        for stage in range(strategy.pp) if stages is None else stages:
            used = self.model.stage(strategy, stage, shape)[0]
            found[stage] = StagePeak(round(used), round(used * 1.04))
        return Measurement(stages=found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", type=Path, default=ROOT / "examples" / "experts" / "deepseek_v3_512p.sh")
    parser.add_argument("--hardware", default="ascend-a3")
    options = parser.parse_args()
    call = capture(options.script)
    words = call.program_args
    shape, operators, hardware = read_shape(words), read_operators(words), read_hardware(options.hardware)
    own = read_strategy(words, call.world_size)
    print(f"The script's own strategy: {own.name}, {iteration_seconds(shape, own, hardware, operators):.1f} s")

    def find(name: str, space: Space) -> SearchResult:
        started = time.monotonic()
        listed = strategies(shape, call.world_size, space, read_dispatcher(words))
        search = Search(
            shape, listed, hardware, hardware.usable_mb, Guess(shape), 1, per_stage=space.per_stage, operators=operators
        )
        result = search.run()
        seconds = time.monotonic() - started
        print(f"{name}: {result.considered} strategies, {result.struck_out} struck out, {seconds:.0f} s")
        for winner in result.winners:
            assert winner.measurement is not None
            print(f"    {winner.strategy.name}, {winner.seconds:.1f} s, {winner.measurement.actual_mb}M")
        return result

    theirs, ours = find("fast-tuner's choices", THEIRS), find("Our space", OURS)
    if theirs.winners and ours.winners:
        ratio = theirs.winners[0].seconds / ours.winners[0].seconds
        print(
            f"The fastest of our space takes {ours.winners[0].seconds:.1f} s: {ratio:.2f} times as fast as the fastest of theirs."
        )


if __name__ == "__main__":
    main()
