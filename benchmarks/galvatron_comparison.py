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
    "Qwen2.5-7B": ModelShape(28, 3584, 18944, 28, 4, 128, 152064, True, False, 4096, 64, True, False),
    "Llama-3.1-8B": ModelShape(32, 4096, 14336, 32, 8, 128, 128256, True, False, 8192, 128, True, False),
    "Llama-2-13B": ModelShape(40, 5120, 13824, 40, 40, 128, 32000, True, False, 4096, 64, True, False),
    "Llama-3-70B": ModelShape(80, 8192, 28672, 64, 8, 128, 128256, True, False, 4096, 256, True, False),
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
