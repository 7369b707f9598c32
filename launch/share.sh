#!/bin/bash
# Runs one share of a job's ranks into a record that all shares write to. Without Ray; the folder must be shared.
#
#   share.sh INDEX COUNT SCRIPT OUT [launch options] [-- trainer arguments]
#
# Share INDEX of COUNT gets every COUNT-th rank of the plan. A share that is started again runs what it lacks. When all
# have ended, `mindspeed-dryrun launch SCRIPT --out OUT` with the same options runs what is still missing, and its
# report covers the whole world.
set -euo pipefail
index=$1 count=$2 script=$3 out=$4
shift 4

ranks=$(mindspeed-dryrun launch "$script" --plan-only --json "$@" | python3 -c '
import json, sys
index, count = map(int, sys.argv[1:])
ranks = [str(rank["rank"]) for rank in json.load(sys.stdin)["ranks"]]
print(",".join(ranks[index::count]))
' "$index" "$count")
if [ -z "$ranks" ]; then
    echo "share $index of $count: the plan has no rank for it"
    exit 0
fi
exec mindspeed-dryrun launch "$script" --out "$out" --partial --ranks "$ranks" "$@"
