#!/bin/bash
# TP 2, PP 4.
export TP=2
export PP=4
bash "$(dirname "$0")/qwen25_7b_8p.sh"
