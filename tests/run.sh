#!/usr/bin/env bash
# The test command: sets up what is needed, checks style and types, runs every test that is not marked slow or stack.
# Arguments go to pytest: `bash tests/run.sh -k stand_in`. Without any, the tests of torch_npu follow in an environment of their own.
set -euo pipefail
EXTRAS=engine,test,ray,studio
. "$(dirname "${BASH_SOURCE[0]}")/../launch/environment.sh"
cd "$ROOT"
if ! command -v chromium >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "Installing chromium for the browser tests"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium; } >/dev/null 2>&1 \
        || echo "chromium could not be installed: the browser tests will be skipped"
fi

run_pytest() { "$1" -m pytest -n "${TEST_JOBS:-$(nproc)}" --dist loadgroup -m "not slow and not stack" "${@:2}"; }

# PyTorch lies where MSAdapter's torch must be, so torch_npu has an environment of its own. PyPI's usual build brings gigabytes of
# CUDA's packages: it is left alone, and PIP_EXTRA_INDEX_URL may name an index that has the CPU build.
TORCH_VENV=${MINDSPEED_DRYRUN_TORCH_VENV:-$ROOT/.venv-torch}
TORCH_STAMP=$TORCH_VENV/.ready-$(cksum < "$ROOT/pyproject.toml" | tr ' ' -)
cpu_torch() {
    local wanted
    wanted=$(sed -n 's/^torch = \["\(torch==[^"]*\)".*/\1/p' pyproject.toml)
    "$PYTHON" -m pip install --dry-run --ignore-installed --quiet --disable-pip-version-check --report - "$wanted" 2>/dev/null | "$PYTHON" -c '
import json, sys
names = [item["metadata"]["name"].lower() for item in json.load(sys.stdin)["install"]]
sys.exit(any(name.startswith(("nvidia", "cuda", "triton")) for name in names))' 2>/dev/null
}
torch_tests() {
    say "Tests of torch_npu"
    if [ ! -e "$TORCH_STAMP" ]; then
        cpu_torch || { echo "skipped: PyTorch cannot be had from the package index without CUDA's packages"; return 0; }
        say "Making a virtual environment in $TORCH_VENV"
        "$PYTHON" -m venv "$TORCH_VENV" || stop "could not make a virtual environment in $TORCH_VENV."
        "$TORCH_VENV/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$ROOT[torch,test]" \
            || stop "pip could not install mindspeed-dryrun[torch] for the tests of torch_npu."
        touch "$TORCH_STAMP"
    fi
    PATH=$TORCH_VENV/bin:$PATH run_pytest "$TORCH_VENV/bin/python" tests/engine/test_torch_*.py
}

say "Style and types"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check --quiet .
"$PYTHON" -m mypy
"$(dirname "$PYTHON")/lint-imports" --no-cache 2>&1 | sed -n "/BROKEN/p;/^Contracts:/,$ p"; test "${PIPESTATUS[0]}" = 0
say "Tests"
status=0
run_pytest "$PYTHON" "$@" || status=$?
[ $# -gt 0 ] || torch_tests || status=$?
exit "$status"
