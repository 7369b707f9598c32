#!/bin/bash
# TP 4, PP 2.
export TP=4
export PP=2
bash "$(dirname "$0")/qwen25_7b_8p.sh"
