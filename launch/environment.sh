# Sourced by quickstart.sh and tests/run.sh: makes the virtual environment, once, and says what it does.
# After it, $PYTHON is an interpreter with mindspeed-dryrun and the extras named in $EXTRAS.
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${MINDSPEED_DRYRUN_VENV:-$ROOT/.venv}
MINDSPORE=${MINDSPORE:-2.7.1}  # the version that upstream's oldest supported release asks for; tests/engine_versions.sh tries the others
DISK_WANTED_GB=5

stop() { echo "mindspeed-dryrun: $*" >&2; exit 1; }
say() { echo "== $*"; }

find_python() {
    local name
    for name in ${MINDSPEED_DRYRUN_PYTHON:-} python3.10 python3.11 python3; do
        # A name may be a version manager's shim that leads nowhere: ask it.
        if "$name" -c 'import sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 11))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    stop "Python 3.10 or 3.11 with venv is needed (MindSpore 2.7.1 has wheels for these). Install python3.10 and python3.10-venv, or set MINDSPEED_DRYRUN_PYTHON."
}

[ "$(uname -s)" = Linux ] || stop "MindSpore's Ascend plugin exists for Linux only: use a Linux machine, a container or WSL 2."
STAMP="$VENV/.ready-$(cat "$ROOT/pyproject.toml" "$ROOT/launch/environment.sh" | cksum | tr ' ' -)-${EXTRAS//,/-}-$MINDSPORE"
PYTHON=$VENV/bin/python
if [ ! -e "$STAMP" ]; then
    base=$(find_python) || exit 1
    free_gb=$(($(df -Pk "$ROOT" | awk 'NR == 2 {print $4}') / 1048576))
    [ "$free_gb" -ge "$DISK_WANTED_GB" ] || stop "$free_gb GB are free here and $DISK_WANTED_GB GB are needed: MindSpore unpacks to 2.2 GB."
    say "Making a virtual environment in $VENV ($("$base" --version))"
    [ -x "$PYTHON" ] || "$base" -m venv "$VENV" || stop "could not make a virtual environment in $VENV: is python3-venv installed?"
    say "Installing mindspeed-dryrun[$EXTRAS] from the package index; the MindSpore wheel alone is 0.8 GB: a few minutes the first time"
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --editable "$ROOT[$EXTRAS]" "mindspore==$MINDSPORE" \
        || stop "pip could not install the packages: is the package index reachable (pip config list), is there room on the disk ($free_gb GB free)?"
    touch "$STAMP"
fi
"$PYTHON" -m mindspeed_dryrun setup || exit 1
