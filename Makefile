# make demo and make test each do the whole set-up on a fresh machine; the second time it takes no time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test quick lint types clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/tetrad demo

test: $(STAMP) lint types
	$(BIN)/python -m pytest -n 2
	$(BIN)/python tests/mutations.py

quick: $(STAMP) lint types
	$(BIN)/python -m pytest -n 2 -m 'not slow and not faults_all'

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: $(STAMP)
	$(BIN)/pyright

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
