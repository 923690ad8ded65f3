# Two commands: `make audit` and `make test`. Each sets up .venv from nothing and reuses it after.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: audit test lint clean

audit: $(READY)
	$(BIN)/leakgauge audit --demo --overwrite --jobs 2

test: $(READY)
	$(BIN)/python -m pytest -n 2

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv leakgauge-audit
