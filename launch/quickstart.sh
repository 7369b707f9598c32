#!/usr/bin/env bash
# From nothing to a figure: a virtual environment, everything from PyPI, and a dry run of the Qwen2.5-7B example.
set -euo pipefail
EXTRAS=engine
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
say "Dry-running Qwen2.5-7B (4 cards, TP 2, PP 2, 10240 tokens): python -m mindspeed_dryrun.launch examples/pretrain_qwen25_7b_32k_ms.sh"
exec "$PYTHON" -m mindspeed_dryrun.launch "$ROOT/examples/pretrain_qwen25_7b_32k_ms.sh" "$@"
