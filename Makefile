# Shortcuts; `bash tests/run.sh` is the one that CI runs.
.PHONY: test unit lint docs wheel
test: ; bash tests/run.sh
unit: ; bash tests/run.sh tests/unit
lint: ; ruff check . && ruff format --check . && mypy && lint-imports
docs: ; mkdocs build --strict
wheel: ; python -m build
