#!/bin/bash
# TP 2, PP 2, CP 2 by Ulysses, 16384 tokens.
export TP=2
export PP=2
export SEQ_LEN=16384
export EXTRA_ARGS="--context-parallel-size 2 --context-parallel-algo ulysses_cp_algo"
bash "$(dirname "$0")/qwen25_7b_8p.sh"
