#!/bin/bash
# TP 2, PP 4, chunks of 2 layers. 28 layers do not divide over 4 stages of such chunks: 4 no-op layers make 32.
export TP=2
export PP=4
export NUM_LAYERS=32
export EXTRA_ARGS="--num-layers-per-virtual-pipeline-stage 2 --noop-layers 2,3,5,8"
bash "$(dirname "$0")/qwen25_7b_8p.sh"
