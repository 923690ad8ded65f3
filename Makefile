# Two commands: `make audit` and `make test`. Each sets up .venv from nothing and reuses it after.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: audit test lint clean

audit: .venv/.demo
	$(BIN)/leakgauge audit --demo --overwrite --jobs 2

test: .venv/.dev
	$(BIN)/python -m pytest -n 2

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The extra of this name, which has all that the command needs.
.venv/.%: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$*]'
	touch $@

clean:
	rm -rf .venv leakgauge-audit
