#!/bin/bash
# TP 4, PP 2, every layer recomputed.
export TP=4
export PP=2
export EXTRA_ARGS="--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
bash "$(dirname "$0")/qwen25_7b_8p.sh"
