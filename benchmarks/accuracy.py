"""The embedded trainer against the published figures and against MindSpeed-LLM itself; prints Markdown.

    python benchmarks/accuracy.py                                     the tutorial's job
    MINDSPEED_CORE_MS_PATH=… python benchmarks/accuracy.py            every case, side by side with the real MindSpeed-LLM
    … --cases vpp,ring --out DIR                                      some of them; records stay in DIR, and are used again

Every rank class of every case is run by both trainers with the same arguments, iterations and microbatches. The second
form wants the packages of MindSpeed-Core-MS's requirements.txt in the Python that runs it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mindspeed_dryrun.launch.job import Job, understand
from mindspeed_dryrun.launch.msrun_call import read_msrun_call
from mindspeed_dryrun.launch.run import Execution, dry_run_job
from mindspeed_dryrun.megatron.arguments import override_args
from mindspeed_dryrun.record.model import RankReport, Report
from mindspeed_dryrun.record.run_spec import RunSpec

COMMON = """
--use-mcore-models --sequence-parallel --disable-bias-linear --use-flash-attn --swiglu --use-fused-swiglu --normalization RMSNorm
--use-fused-rmsnorm --position-embedding-type rope --use-fused-rotary-pos-emb --untie-embeddings-and-output-weights
--micro-batch-size 1 --make-vocab-size-divisible-by 1 --attention-dropout 0.0 --hidden-dropout 0.0 --bf16
--no-gradient-accumulation-fusion --no-masked-softmax-fusion --attention-softmax-in-fp32 --train-iters 2000 --lr 1e-6
--tokenizer-type PretrainedFromHF --tokenizer-name-or-path nowhere --data-path nowhere --split 100,0,0 --eval-iters 0
--eval-interval 2000 --save-interval 2000 --log-interval 1 --distributed-backend nccl --ai-framework mindspore
"""
QWEN25_7B = (
    COMMON
    + """
--num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28 --group-query-attention
--num-query-groups 4 --add-qkv-bias --norm-epsilon 1e-6 --rotary-base 1000000 --padded-vocab-size 152064
"""
)
LLAMA31_8B = (
    COMMON
    + """
--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
--num-query-groups 8 --norm-epsilon 1e-5 --rotary-base 500000 --padded-vocab-size 128256
"""
)
QWEN3_8B = (
    COMMON
    + """
--num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32 --group-query-attention --kv-channels 128
--num-query-groups 8 --qk-layernorm --norm-epsilon 1e-6 --rotary-base 1000000 --padded-vocab-size 151936
--spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec
"""
)
INTERNLM2_20B = (
    COMMON
    + """
--num-layers 48 --hidden-size 6144 --ffn-hidden-size 16384 --num-attention-heads 48 --group-query-attention
--num-query-groups 8 --norm-epsilon 1e-5 --rotary-base 1000000 --padded-vocab-size 92544
"""
)
LLAMA2_13B = (
    COMMON
    + """
--num-layers 40 --hidden-size 5120 --ffn-hidden-size 13824 --num-attention-heads 40 --norm-epsilon 1e-5 --padded-vocab-size 32000
"""
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@dataclass(frozen=True)
class Case:
    """A job: the model, how many ranks, and the layout."""

    model: str
    flags: str
    world_size: int
    layout: str


def sizes(tokens: int, tp: int, pp: int, batch: int) -> str:
    return (
        f"--seq-length {tokens} --max-position-embeddings {tokens} --tensor-model-parallel-size {tp} "
        f"--pipeline-model-parallel-size {pp} --global-batch-size {batch}"
    )


TUTORIAL = {
    "tutorial": Case("Qwen2.5-7B", QWEN25_7B, 4, sizes(10240, 2, 2, 64)),
    "tutorial, recomputed": Case("Qwen2.5-7B", QWEN25_7B, 4, sizes(10240, 2, 2, 64) + " " + FULL),
}
# (published dry run, published NPU) of the first stage: used and with fragments
PUBLISHED = {
    "tutorial": ((55389, 57341), (55405, 57400)),
    "tutorial, recomputed": ((34946, 35720), (35073, 36174)),
}
CASES = TUTORIAL | {
    "lab tp2pp4": Case("Qwen2.5-7B", QWEN25_7B, 8, sizes(4096, 2, 4, 64)),
    "vpp": Case("Qwen2.5-7B", QWEN25_7B, 8, sizes(4096, 2, 4, 64)
                + " --num-layers 32 --noop-layers 2,3,5,8 --num-layers-per-virtual-pipeline-stage 2"),
    "lab tp4pp2": Case("Qwen2.5-7B", QWEN25_7B, 8, sizes(4096, 4, 2, 64)),
    "lab tp4pp2, recomputed": Case("Qwen2.5-7B", QWEN25_7B, 8, sizes(4096, 4, 2, 64) + " " + FULL),
    "ring": Case("Qwen2.5-7B", QWEN25_7B, 8, sizes(16384, 2, 2, 64)
                 + " --context-parallel-size 2 --context-parallel-algo megatron_cp_algo --use-cp-send-recv-overlap"),
    "ulysses": Case("Qwen2.5-7B", QWEN25_7B, 8, sizes(16384, 2, 2, 64)
                    + " --context-parallel-size 2 --context-parallel-algo ulysses_cp_algo"),
    "hybrid": Case("Qwen2.5-7B", QWEN25_7B, 8, sizes(16384, 1, 2, 16) + " --context-parallel-size 4 --use-cp-send-recv-overlap"
                   " --context-parallel-algo hybrid_cp_algo --ulysses-degree-in-cp 2"),
    "ring with a window": Case("Llama3.1-8B", LLAMA31_8B, 8, sizes(16384, 1, 2, 16) + " --context-parallel-size 4"
                               " --context-parallel-algo megatron_cp_algo --cp-window-size 2 --use-cp-send-recv-overlap"),
    "distributed optimizer": Case("Llama3.1-8B", LLAMA31_8B, 8, sizes(8192, 2, 2, 64)
                                  + " --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "reuse fp32": Case("Llama3.1-8B", LLAMA31_8B, 8, sizes(8192, 4, 1, 64) + " --use-distributed-optimizer --reuse-fp32-param"),
    "qk-layernorm": Case("Qwen3-8B", QWEN3_8B, 8, sizes(4096, 4, 2, 64)),
    "uneven stages": Case("InternLM2-20B", INTERNLM2_20B, 8, sizes(4096, 4, 2, 32) + " --num-layer-list 22,26"),
    "no GQA, block recompute": Case("Llama2-13B", LLAMA2_13B, 8, sizes(4096, 4, 2, 64)
                                    + " --recompute-granularity full --recompute-method block --recompute-num-layers 8"),
    "recomputed stage by stage": Case("Qwen2.5-7B", QWEN25_7B, 8, sizes(4096, 1, 4, 64) + " --use-distributed-optimizer --num-layers 44"
                                      " --noop-layers 7,8,9,10,11,12,21,22,23,24,33,34,35,41,42,43 --recompute-granularity full"
                                      " --recompute-method block --recompute-num-layers 3"),
    "vpp with recomputed layers of a stage": Case("Qwen2.5-7B", QWEN25_7B, 8, sizes(4096, 2, 4, 64) + " --num-layers 32 --noop-layers 1,3,5,31"
                                             " --num-layers-per-virtual-pipeline-stage 2 --recompute-granularity full"
                                             " --recompute-method block --recompute-num-layers 3 --enable-recompute-layers-per-pp-rank"),
    "selective with micro batch 2": Case("Llama3.1-8B", LLAMA31_8B, 8, sizes(4096, 2, 2, 64)
                                     + " --micro-batch-size 2 --recompute-granularity selective"),
    "activation recompute": Case("Llama2-13B", LLAMA2_13B, 8, sizes(4096, 4, 2, 64) + " --recompute-activation-function"),
}  # fmt: skip


def job_of(case: Case) -> Job:
    argv = ["--worker_num", str(case.world_size), "--local_worker_num", str(min(8, case.world_size)), "pretrain_gpt.py"]
    return understand(
        read_msrun_call([*argv, *override_args(case.flags.split(), case.layout.split())], str(Path.cwd())), "a case"
    )


def run(case: Case, trainer: str, out: Path, jobs: int) -> Report:
    print(f"{case.model} {case.layout}: {trainer}", file=sys.stderr)
    return dry_run_job(job_of(case), out, RunSpec(trainer=trainer), Execution(jobs=jobs))


def figures(rank: RankReport | None) -> str:
    if rank is None:
        return "—"
    if rank.used_peak_mb is None:
        return f"{rank.status}: {rank.error}"
    return f"{rank.used_peak_mb} / {rank.actual_peak_mb}"


def difference(ours: int | None, theirs: int | None) -> str:
    if ours is None or theirs is None:
        return "—"
    return "equal" if ours == theirs else f"{ours - theirs:+d}M ({100 * (ours - theirs) / theirs:+.2f} %)"


def tutorial_table(reports: dict[str, Report]) -> str:
    lines = [
        "| job | rank | embedded trainer | published dry run | difference (used) | published NPU |",
        "|---|---|---|---|---|---|",
    ]
    for name, report in reports.items():
        for rank in report.ranks:
            dry, npu = PUBLISHED[name] if rank.stage == 0 else (None, None)
            lines.append(
                f"| {name} | {rank.rank} | {figures(rank)} | {f'{dry[0]} / {dry[1]}' if dry else '—'} | "
                f"{difference(rank.used_peak_mb, dry[0]) if dry else '—'} | {f'{npu[0]} / {npu[1]}' if npu else '—'} |"
            )
    return "\n".join(lines)


def stack_table(embedded: dict[str, Report], real: dict[str, Report]) -> str:
    lines = [
        "| case | model | ranks | rank | embedded | MindSpeed-LLM | used | with fragments |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, report in embedded.items():
        theirs = {rank.rank: rank for rank in real[name].ranks}
        for rank in report.ranks:
            other = theirs.get(rank.rank)
            lines.append(
                f"| {name} | {CASES[name].model} | {CASES[name].world_size} | {rank.rank} | {figures(rank)} | {figures(other)} | "
                f"{difference(rank.used_peak_mb, other.used_peak_mb if other else None)} | "
                f"{difference(rank.actual_peak_mb, other.actual_peak_mb if other else None)} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", help="names from the table, with commas between them")
    parser.add_argument("--out", type=Path, help="folder for the records (default: a temporary one)")
    parser.add_argument("--jobs", type=int, default=1, help="ranks at once")
    options = parser.parse_args()
    beside = bool(os.environ.get("MINDSPEED_CORE_MS_PATH"))
    names = options.cases.split(",") if options.cases else list(CASES if beside else TUTORIAL)
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch)
        embedded = {name: run(CASES[name], "embedded", out / "embedded" / name, options.jobs) for name in names}
        published = {name: report for name, report in embedded.items() if name in PUBLISHED}
        if published:
            print("MB, used / with fragments\n\n" + tutorial_table(published) + "\n")
        if beside:
            real = {name: run(CASES[name], "script", out / "script" / name, options.jobs) for name in names}
            print("MB, used / with fragments\n\n" + stack_table(embedded, real))


if __name__ == "__main__":
    main()
