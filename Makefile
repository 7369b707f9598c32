# Shortcuts; `bash tests/run.sh` is the one that CI runs.
.PHONY: test unit coverage lint docs wheel
test: ; bash tests/run.sh
unit: ; bash tests/run.sh tests/unit
coverage: ; bash tests/run.sh --cov=mindspeed_dryrun --cov-report=term:skip-covered
lint: ; ruff check . && ruff format --check . && mypy && lint-imports
docs: ; mkdocs build --strict
wheel: ; python -m build
