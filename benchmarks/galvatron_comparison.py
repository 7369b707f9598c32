"""Our search and Galvatron's recurrence on the same memory and time tables. Needs no engine; takes about a minute.

    python benchmarks/galvatron_comparison.py

Galvatron lets every layer choose its own layout. Megatron cannot, so its plan is shown twice: as planned, and as it would be
trained, with the first layer's sizes and recomputation for all if any layer asks for it (its own guide says so). All are timed
by the same time model, and all must fit by the same count of weights, gradients, optimizer states and saved activations.
"""

from __future__ import annotations

from pathlib import Path

from galvatron import Plan
from galvatron_search import compare

from mindspeed_dryrun.devices.hardware import read_hardware
from mindspeed_dryrun.megatron.model_shape import ModelShape
from mindspeed_dryrun.report.text import table

ROOT = Path(__file__).resolve().parents[1]
# layers, hidden, ffn, heads, query groups, head size, vocabulary, gated, tied, tokens, global batch, states
MODELS = {
    "Qwen2.5-7B": ModelShape(
        layers=28,
        hidden=3584,
        ffn=18944,
        heads=28,
        query_groups=4,
        head_dim=128,
        vocab=152064,
        gated=True,
        tied=False,
        seq=4096,
        global_batch=64,
        full_states=True,
        shared_master=False,
    ),
    "Llama-3.1-8B": ModelShape(
        layers=32,
        hidden=4096,
        ffn=14336,
        heads=32,
        query_groups=8,
        head_dim=128,
        vocab=128256,
        gated=True,
        tied=False,
        seq=8192,
        global_batch=128,
        full_states=True,
        shared_master=False,
    ),
    "Llama-2-13B": ModelShape(
        layers=40,
        hidden=5120,
        ffn=13824,
        heads=40,
        query_groups=40,
        head_dim=128,
        vocab=32000,
        gated=True,
        tied=False,
        seq=4096,
        global_batch=64,
        full_states=True,
        shared_master=False,
    ),
    "Llama-3-70B": ModelShape(
        layers=80,
        hidden=8192,
        ffn=28672,
        heads=64,
        query_groups=8,
        head_dim=128,
        vocab=128256,
        gated=True,
        tied=False,
        seq=4096,
        global_batch=256,
        full_states=True,
        shared_master=False,
    ),
}
CASES = [
    ("Qwen2.5-7B", 8, 58), ("Qwen2.5-7B", 8, 40), ("Qwen2.5-7B", 8, 28), ("Qwen2.5-7B", 64, 40), ("Llama-3.1-8B", 8, 58),
    ("Llama-3.1-8B", 16, 40), ("Llama-2-13B", 8, 58), ("Llama-2-13B", 16, 30), ("Llama-3-70B", 64, 58),
]  # fmt: skip


def main() -> None:
    hardware = read_hardware("ascend910b-64g")
    rows = []
    for name, cards, budget_gb in CASES:
        found = compare(MODELS[name], cards, budget_gb * 1024, hardware)
        layouts = sorted({f"TP{layer.tp} DP{layer.dp}" for layer in found.plan.layers}) if found.plan else []
        plan = f"PP{found.plan.pp} {' and '.join(layouts)}, {_recomputed(found.plan)}" if found.plan else "nothing fits"
        rows.append(
            [
                name, cards, f"{budget_gb}G", found.ours.name if found.ours else "nothing fits", f"{found.ours_s:.2f}", plan,
                f"{found.plan_s:.2f}", f"{100 * (found.plan_s / found.ours_s - 1):+.1f}%", f"{found.theirs_s:.2f}",
                f"{100 * (found.theirs_s / found.ours_s - 1):+.1f}%",
            ]
        )  # fmt: skip
    head = ["model", "cards", "budget", "ours", "s", "Galvatron's plan", "s", "slower by", "as trained, s", "slower by"]
    print(table(head, rows))


def _recomputed(plan: Plan) -> str:
    count = len(plan.layers) // plan.pp
    stages = [sum(layer.recompute for layer in plan.layers[first : first + count]) for first in range(0, len(plan.layers), count)]
    return f"recomputed layers by stage {stages}" if any(stages) else "nothing recomputed"


if __name__ == "__main__":
    main()
