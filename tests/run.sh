#!/usr/bin/env bash
# The test command: sets up what is needed, checks style and types, runs every test that is not marked slow or stack.
# Arguments go to pytest: `bash tests/run.sh -k stand_in`.
set -euo pipefail
EXTRAS=engine,test,ray,studio
. "$(dirname "${BASH_SOURCE[0]}")/../launch/environment.sh"
cd "$ROOT"
if ! command -v chromium >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "Installing chromium for the browser tests"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium; } >/dev/null 2>&1 \
        || echo "chromium could not be installed: the browser tests will be skipped"
fi
say "Style and types"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check --quiet .
"$PYTHON" -m mypy
"$(dirname "$PYTHON")/lint-imports" --no-cache 2>&1 | sed -n "/BROKEN/p;/^Contracts:/,$ p"; test "${PIPESTATUS[0]}" = 0
say "Tests"
exec "$PYTHON" -m pytest -n "${TEST_JOBS:-$(nproc)}" --dist loadgroup -m "not slow and not stack" "$@"
