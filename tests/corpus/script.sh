#!/bin/bash
export TP=8 PP=$(( (1+2) * 3 )) ; NAME="a b" ARGS='x;y'
if [ -n "$1" ]; then LIST=(1 2 3); fi
cat <<EOF > file
TP=1
EOF
{ echo `date` ${X:-"a b"}; } &> log.txt
for i in 1 2; do msrun --worker_num $TP p.py; done > >(tee log) 2>&1
