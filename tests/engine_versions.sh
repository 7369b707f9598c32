#!/usr/bin/env bash
# Runs the engine's tests on other versions of MindSpore, each in an environment of its own (2.5 GB a version):
# `bash tests/engine_versions.sh`, or `bash tests/engine_versions.sh 2.9.0 2.10.0`. TEST_ARGS goes to pytest.
set -uo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
versions=("$@")
[ $# -gt 0 ] || versions=(2.7.2 2.8.0 2.9.0 2.10.0)
failed=()
for version in "${versions[@]}"; do
    echo "== MindSpore $version"
    (
        set -e
        EXTRAS=engine,test,ray MINDSPORE=$version MINDSPEED_DRYRUN_VENV=${ENGINE_VENVS:-$HERE/../.venvs}/ms$version
        . "$HERE/../launch/environment.sh"
        cd "$ROOT"
        "$PYTHON" -m pytest tests/engine -m "not slow and not stack" ${TEST_ARGS:-}
    ) || failed+=("$version")
done
[ ${#failed[@]} = 0 ] || { echo "Failed on MindSpore ${failed[*]}." >&2; exit 1; }
