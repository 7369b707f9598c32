"""How the peak of a job grows with its sequence length: one dry run for each, drawn as an SVG file.

python examples/plot_sequence_length.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from mindspeed_dryrun import dry_run

SCRIPT = Path(__file__).with_name("pretrain_qwen25_7b_32k_ms.sh")
LENGTHS = (2048, 4096, 6144, 8192, 10240)
WIDTH, HEIGHT, BAR = 640, 300, 72


def main(out: Path) -> None:
    """Runs, prints and draws."""
    reports = {length: dry_run(SCRIPT, variables={"SEQ_LEN": length}, out=out / str(length)) for length in LENGTHS}
    usable = max(report.budget_mb or 0 for report in reports.values())
    bars = []
    for index, (length, report) in enumerate(reports.items()):
        peak = report.actual_peak_mb or 0
        print(f"{length:6} tokens  {peak:6}M with fragments  {report.verdict}")
        x, tall = 40 + index * (BAR + 40), HEIGHT * peak / usable
        bars.append(f'<rect x="{x}" y="{HEIGHT - tall + 20:.0f}" width="{BAR}" height="{tall:.0f}" fill="#4a6fd6"/>')
        bars.append(f'<text x="{x}" y="{HEIGHT + 40}">{length}</text><text x="{x}" y="{HEIGHT - tall + 15:.0f}">{peak}M</text>')
    limit = f'<line x1="20" x2="{WIDTH - 20}" y1="20" y2="20" stroke="#c33"/><text x="20" y="14">{usable}M usable</text>'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT + 60}">{limit}{"".join(bars)}</svg>\n'
    (out / "peaks.svg").write_text(svg, encoding="utf-8")
    print(f"written: {out / 'peaks.svg'}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "sequence_length"))
