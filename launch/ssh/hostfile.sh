#!/bin/bash
# A dry run on the machines of a hostfile, over ssh:
#
#   launch/ssh/hostfile.sh HOSTFILE SCRIPT OUT [launch options] [-- trainer arguments]
#
# HOSTFILE: one machine per line; what follows the name (`slots=8`) and `#` comments are left out. A Ray cluster of
# this machine and those lives as long as this command. mindspeed-dryrun[engine,ray] must be installed on every machine;
# REMOTE_SETUP is run there first (such as `source ~/venv/bin/activate`), SSH_OPTIONS goes to ssh as it is.
set -euo pipefail
if [ $# -lt 3 ]; then
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
hostfile=$1 script=$2 out=$3
shift 3
mapfile -t hosts < <(sed 's/#.*//' "$hostfile" | awk 'NF { print $1 }' | sort -u)
address=${HEAD_ADDRESS:-$(hostname --ip-address | awk '{ print $1; exit }')}
export RAY_ADDRESS="$address:${HEAD_PORT:-6399}"
# shellcheck disable=SC2206
options=(${SSH_OPTIONS:-})
started=()
end() {
    trap - EXIT INT TERM
    kill "${started[@]}" 2>/dev/null || true
    wait
}
trap end EXIT
trap 'end; exit 143' INT TERM

ray start --head --block --disable-usage-stats --node-ip-address="$address" --port="${RAY_ADDRESS##*:}" \
    --include-dashboard=false >/dev/null &
started+=($!)
for _ in $(seq 60); do
    ray status --address "$RAY_ADDRESS" >/dev/null 2>&1 && break
    sleep 1
done
for host in "${hosts[@]}"; do
    # -tt: the far side ends when this one does, whatever happens here
    ssh -tt -o BatchMode=yes "${options[@]}" "$host" \
        "${REMOTE_SETUP:+$REMOTE_SETUP; }exec ray start --address=$RAY_ADDRESS --block --disable-usage-stats" \
        </dev/null >/dev/null &
    started+=($!)
done

status=0
mindspeed-dryrun launch "$script" --executor ray --out "$out" "$@" || status=$?
exit "$status"
