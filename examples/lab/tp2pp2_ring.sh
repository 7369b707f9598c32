#!/bin/bash
# TP 2, PP 2, CP 2 by ring attention, 16384 tokens.
export TP=2
export PP=2
export SEQ_LEN=16384
export EXTRA_ARGS="--context-parallel-size 2 --context-parallel-algo megatron_cp_algo --use-cp-send-recv-overlap"
bash "$(dirname "$0")/qwen25_7b_8p.sh"
