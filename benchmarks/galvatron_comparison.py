"""Our search and Galvatron's recurrence on the same memory and time tables. Needs no engine; takes about a minute.

    python benchmarks/galvatron_comparison.py

Galvatron lets every layer choose its own layout. Megatron cannot, so its plan is trained with the first layer's sizes, and with
recomputation for all if any layer asks for it (its own guide says so); that is what is compared. Both are timed by the same
time model, and both must fit by the same count of weights, gradients, optimizer states and saved activations.
"""

from __future__ import annotations

from pathlib import Path

from mindspeed_dryrun.strategy.comparison import compare
from mindspeed_dryrun.strategy.hardware import read_hardware
from mindspeed_dryrun.strategy.shape import ModelShape
from mindspeed_dryrun.strategy.text import table

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
    hardware = read_hardware(ROOT / "examples" / "hardware" / "ascend910b.yaml")
    rows = []
    for name, cards, budget_gb in CASES:
        found = compare(MODELS[name], cards, budget_gb * 1024, hardware)
        theirs = found.theirs.name if found.theirs else "nothing fits"
        if found.theirs and not found.theirs_fits:
            theirs += " (does not fit)"
        gain = found.theirs_s / found.ours_s - 1
        rows.append(
            [
                name, cards, f"{budget_gb}G", found.ours.name if found.ours else "nothing fits", f"{found.ours_s:.2f}", theirs,
                f"{found.theirs_s:.2f}" if found.theirs else "-", f"{100 * gain:+.1f}%" if found.theirs else "-",
            ]
        )  # fmt: skip
    head = ["model", "cards", "budget", "ours", "s", "Galvatron's, as trained", "s", "ours faster by"]
    print(table(head, rows))


if __name__ == "__main__":
    main()
