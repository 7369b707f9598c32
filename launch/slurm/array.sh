#!/bin/bash
# A dry run as a Slurm job array, without Ray. Run it on the login node:
#
#   launch/slurm/array.sh SCRIPT OUT [launch options] [-- trainer arguments]
#
# SHARES (default 4) is the number of array tasks, SBATCH_OPTIONS goes to sbatch as it is (partition, account, …).
# OUT must be on a file system that all nodes see. A second job, after the array, runs what is missing and writes the
# report of all ranks; submitting the same again continues the record.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ $# -lt 2 ]; then
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
script=$1 out=$2
shift 2
shares=${SHARES:-4}
words=$(printf ' %q' "$script" "$out" "$@")
# shellcheck disable=SC2206
options=(${SBATCH_OPTIONS:-})

array=$(sbatch --parsable --job-name=dryrun --array="0-$((shares - 1))" --ntasks=1 \
    --cpus-per-task="${CPUS_PER_SHARE:-4}" --mem="${MEMORY_PER_SHARE:-8G}" --output=dryrun-%A_%a.out "${options[@]}" \
    --wrap "$(printf 'exec bash %q "$SLURM_ARRAY_TASK_ID" %q%s' "$here/share.sh" "$shares" "$words")")
report=$(sbatch --parsable --job-name=dryrun-report --dependency="afterany:${array%%;*}" --ntasks=1 \
    --cpus-per-task="${CPUS_PER_SHARE:-4}" --mem="${MEMORY_PER_SHARE:-8G}" --output=dryrun-%j.out "${options[@]}" \
    --wrap "$(printf 'exec mindspeed-dryrun launch %q --out %q%s' "$script" "$out" "$(printf ' %q' "$@")")")
echo "array ${array%%;*}, report ${report%%;*} (dryrun-${report%%;*}.out)"
