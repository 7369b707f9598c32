"""Is the search right? Small spaces tried out in full by dry run, then searched; and memory predicted for what was held out.

    python benchmarks/search_quality.py --out quality            # six models x cluster sizes, about 190 simulated ranks
    python benchmarks/search_quality.py --out quality --case 0   # one of them
    python benchmarks/search_quality.py --out quality --experts  # six mixtures of experts
    python benchmarks/search_quality.py --out quality --experts --trainer script --micro-batch 1   # by the real MindSpeed-LLM

For every case all strategies are dry-run; the budget is set between them; the search is run on the same engine. Shown: whether the
winner is the one of the exhaustive table, how many dry runs each took, and the error of the memory prediction on the stages
that the search had not seen. Records are kept in --out: a second run costs nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
from pathlib import Path

from mindspeed_dryrun.devices.hardware import read_hardware
from mindspeed_dryrun.estimate.strategy import Recompute, Strategy, read_dispatcher
from mindspeed_dryrun.launch.run import Execution
from mindspeed_dryrun.launch.script import capture
from mindspeed_dryrun.megatron.model_shape import read_shape
from mindspeed_dryrun.record.run_spec import RunSpec
from mindspeed_dryrun.report.text import say, table
from mindspeed_dryrun.search.measure import DryRuns
from mindspeed_dryrun.search.search import Search
from mindspeed_dryrun.search.space import Space, strategies

ROOT = Path(__file__).resolve().parents[1]
# name, cards, layers (few: a simulated layer costs time, its width costs none), flags of the published model. One with `stages` in
# its name recomputes any number of layers of any stage; the others none or all.
_COMMON = (
    "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --use-flash-attn --use-fused-rmsnorm "
    "--use-fused-swiglu --use-fused-rotary-pos-emb --attention-dropout 0.0 --hidden-dropout 0.0 --bf16 --train-iters 10 --lr 1e-5 "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --use-mcore-models --sequence-parallel --micro-batch-size 1 "
    "--global-batch-size 32"
)
CASES = [
    ("Qwen2.5-7B, 6 layers", 4, 6, "--hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28 --group-query-attention "
     "--num-query-groups 4 --padded-vocab-size 152064 --untie-embeddings-and-output-weights --add-qkv-bias --seq-length 4096"),
    ("Llama-3.1-8B, 4 layers", 4, 4, "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
     "--num-query-groups 8 --padded-vocab-size 128256 --untie-embeddings-and-output-weights --seq-length 8192"),
    ("Qwen2.5-0.5B, 8 layers", 2, 8, "--hidden-size 896 --ffn-hidden-size 4864 --num-attention-heads 14 --group-query-attention "
     "--num-query-groups 2 --padded-vocab-size 151936 --add-qkv-bias --seq-length 4096"),
    ("Llama-2-13B, 4 layers", 8, 4, "--hidden-size 5120 --ffn-hidden-size 13824 --num-attention-heads 40 --padded-vocab-size 32000 "
     "--untie-embeddings-and-output-weights --seq-length 4096"),
    ("Qwen3-8B, 4 layers", 4, 4, "--hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32 --group-query-attention "
     "--num-query-groups 8 --kv-channels 128 --qk-layernorm --padded-vocab-size 151936 --untie-embeddings-and-output-weights "
     "--seq-length 4096"),
    ("Qwen2.5-7B, 6 layers, stages", 4, 6, "--hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28 --group-query-attention "
     "--num-query-groups 4 --padded-vocab-size 152064 --untie-embeddings-and-output-weights --add-qkv-bias --seq-length 16384"),
]  # fmt: skip
_EXPERTS = (
    "--moe-grouped-gemm --moe-permutation-async-comm --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.001 "
    "--make-vocab-size-divisible-by 1 --untie-embeddings-and-output-weights --use-rotary-position-embeddings "
    "--ai-framework mindspore --distributed-backend nccl"
)
_LATENT = (
    "--spec mindspeed_llm.tasks.models.spec.deepseek_spec layer_spec --multi-latent-attention --qk-pos-emb-head-dim 64 "
    "--qk-head-dim 128 --kv-lora-rank 512 --v-head-dim 128 --qk-layernorm --shape-order BNSD"
)
_QWEN3 = (
    "--spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec --kv-channels 128 --qk-layernorm --norm-topk-prob "
    "--hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --group-query-attention --num-query-groups 4 "
    "--padded-vocab-size 151936 --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-layer-freq -1 "
    "--first-k-dense-replace -1 --seq-length 4096"
)
MIXTURES = [
    ("Qwen3-30B-A3B, 4 layers", 4, 4, f"{_QWEN3} --moe-token-dispatcher-type alltoall_seq {_EXPERTS}"),
    ("Mixtral-8x7B, 4 layers", 4, 4, "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
     "--num-query-groups 8 --padded-vocab-size 32000 --num-experts 8 --moe-router-topk 2 --moe-layer-freq -1 "
     f"--first-k-dense-replace -1 --moe-token-dispatcher-type alltoall --seq-length 4096 {_EXPERTS}"),
    ("DeepSeek-V2-Lite, 4 layers", 4, 4, f"{_LATENT} --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 "
     "--padded-vocab-size 102400 --num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 1408 --n-shared-experts 2 "
     f"--first-k-dense-replace 1 --moe-layer-freq 1 --moe-token-dispatcher-type alltoall_seq --seq-length 4096 {_EXPERTS}"),
    ("Qwen2-57B-A14B, 4 layers", 4, 4, "--hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28 --group-query-attention "
     "--num-query-groups 4 --add-qkv-bias --padded-vocab-size 151936 --num-experts 64 --moe-router-topk 8 --n-shared-experts 8 "
     "--moe-ffn-hidden-size 2560 --shared-expert-gate --moe-layer-freq -1 --first-k-dense-replace -1 "
     f"--moe-token-dispatcher-type alltoall_seq --seq-length 4096 {_EXPERTS}"),
    ("DeepSeek-V3, 4 layers, 64 experts", 4, 4, f"{_LATENT} --q-lora-rank 1536 --hidden-size 7168 --ffn-hidden-size 18432 "
     "--num-attention-heads 128 --padded-vocab-size 129280 --num-experts 64 --moe-router-topk 8 --moe-ffn-hidden-size 2048 "
     "--n-shared-experts 1 --first-k-dense-replace 1 --moe-layer-freq 1 --mtp-num-layers 1 "
     f"--moe-token-dispatcher-type alltoall_seq --seq-length 4096 {_EXPERTS}"),
    ("Qwen3-30B-A3B, 4 layers, gathered", 4, 4, f"{_QWEN3} --moe-token-dispatcher-type allgather {_EXPERTS}"),
]  # fmt: skip
_SPACE = Space(
    tp=(1, 2), pp=(1, 2), vpp=(1,), micro_batch=(1, 2), recompute=(Recompute(), Recompute("full", 1)), blocks=False,
    uneven=False, distributed_optimizer=(True,),
)  # fmt: skip
_EXPERT_SPACE = dataclasses.replace(_SPACE, ep=(2, 4))


_BY_STAGE = dataclasses.replace(_SPACE, pp=(2,), micro_batch=(1,), recompute=(Recompute(),), blocks=True)


def every_count(listed: list[Strategy]) -> list[Strategy]:
    """Every combination of recomputed layers of both stages."""
    found = []
    for layout in dict.fromkeys(dataclasses.replace(item, recompute=Recompute()) for item in listed):
        for each in itertools.product(*(range(stage[0] + 1) for stage in layout.stages)):
            same = len(set(each)) == 1
            recompute = Recompute("block", max(each), () if same else each) if any(each) else Recompute()
            found.append(dataclasses.replace(layout, recompute=recompute))
    return found


@dataclasses.dataclass
class Outcome:
    """One case."""

    name: str
    cards: int
    strategies: int
    budget_mb: int
    exhaustive: str
    search: str
    within_budget: bool
    dry_runs: int
    probes: int
    held_out: list[tuple[str, int, float, int]]  # strategy, stage, predicted, counted

    @property
    def right(self) -> bool:
        return self.exhaustive == self.search


def run_case(index: int, args: argparse.Namespace) -> Outcome:
    """Exhaustive first, then the search."""
    experts, trainer = args.experts, args.trainer
    name, cards, layers, flags = (MIXTURES if experts else CASES)[index]
    if trainer == "embedded":  # which has no layers of multi-token prediction
        flags = flags.replace("--mtp-num-layers 1 ", "")
    folder = (args.out / f"{'mixture' if experts else 'case'}{index}").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "train.sh"
    length = flags.split("--seq-length ")[1].split()[0]
    words = f"--num-layers {layers} --max-position-embeddings {length} {flags} {_COMMON}"
    script.write_text(f"msrun --worker_num {cards} --local_worker_num {cards} pretrain_gpt.py {words}\n")
    call = capture(script)
    shape = read_shape(call.program_args)
    hardware = read_hardware("ascend910b-64g")
    per_stage = name.endswith("stages")
    space = _EXPERT_SPACE if experts else _BY_STAGE if per_stage else _SPACE
    space = dataclasses.replace(space, micro_batch=tuple(args.micro_batch or space.micro_batch))
    measure = DryRuns(call, str(script), 8, folder / "runs", RunSpec(trainer=trainer), Execution(jobs=args.jobs))
    listed = strategies(shape, cards, space, read_dispatcher(call.program_args))
    listed = [item for item in listed if measure.refusal(item) is None]
    counted = {}
    everything = every_count(listed) if per_stage else listed
    for number, strategy in enumerate(everything, 1):
        say(f"{name}: exhaustive {number}/{len(everything)} {strategy.name}")
        found = measure(strategy)
        if found.error:
            say(f"{name}: {strategy.name} cannot be run: {found.error}")
            continue
        counted[strategy] = found
    everything = list(counted)
    listed = [item for item in listed if item in counted or per_stage]
    peaks = sorted(found.actual_mb for found in counted.values())
    budget = (peaks[len(peaks) // 3] + peaks[len(peaks) // 3 + 1]) // 2
    search = Search(
        shape, listed, hardware, budget, measure, 1, lambda step: say(f"{step.phase}: {step.what}"), per_stage=per_stage,
        refusal=measure.refusal,
    )  # fmt: skip
    order = Search(shape, everything, hardware, 1 << 30, measure).result.candidates
    # As the search has it: the communicators must fit beside the pool.
    room = max(hardware.total_mb, budget)
    peaks_of = ((item.strategy, counted[item.strategy]) for item in order)
    best = next(one for one, found in peaks_of if found.actual_mb <= min(budget, room - found.outside_mb))
    result = search.run()
    seen = {seen.strategy for seen in search.model.observations}
    held_out = [
        (strategy.name, stage, search.model.stage(strategy, stage)[0], peak.used_mb)
        for strategy in everything
        if strategy not in seen
        for stage, peak in counted[strategy].stages.items()
    ]
    winner = result.winners[0]
    assert winner.measurement is not None
    return Outcome(
        name, cards, len(everything), budget, best.name, winner.strategy.name, winner.measurement.actual_mb <= budget,
        result.dry_runs, result.probes, held_out,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the records")
    parser.add_argument("--case", type=int, action="append", help="only this case (repeatable)")
    parser.add_argument("--experts", action="store_true", help="the mixtures of experts")
    parser.add_argument("--trainer", default="embedded", choices=("embedded", "script"))
    parser.add_argument("--micro-batch", type=int, nargs="+", help="micro batches of the spaces, in place of theirs")
    parser.add_argument("--jobs", type=int, help="number of ranks to run at once")
    args = parser.parse_args()
    cases = args.case or range(len(MIXTURES if args.experts else CASES))
    outcomes = [run_case(index, args) for index in cases]
    rows = [
        [
            item.name, item.cards, item.strategies, f"{item.budget_mb}M", item.exhaustive, item.search,
            "yes" if item.right else "NO", "yes" if item.within_budget else "NO", f"{item.probes} + {item.dry_runs}",
        ]
        for item in outcomes
    ]  # fmt: skip
    head = ["model", "cards", "strategies", "budget", "exhaustive winner", "search winner", "same", "fits", "small + full runs"]
    print(table(head, rows))
    points = [(item.name, *point) for item in outcomes for point in item.held_out]
    errors = sorted(abs(predicted / counted - 1) for _, _, _, predicted, counted in points)
    lines = [
        [name, strategy, stage, f"{predicted:.0f}", counted, f"{100 * (predicted / counted - 1):+.2f}%"]
        for name, strategy, stage, predicted, counted in points
    ]
    print()
    print(table(["model", "strategy", "stage", "predicted M", "dry run M", "error"], lines, left=2))
    if errors:
        print(
            f"\n{len(errors)} stages held out: median error {100 * statistics.median(errors):.2f}%, "
            f"worst {100 * errors[-1]:.2f}%."
        )
    (args.out / "search_quality.json").write_text(json.dumps([dataclasses.asdict(item) for item in outcomes], indent=1))


if __name__ == "__main__":
    main()
