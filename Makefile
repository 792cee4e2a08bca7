# `make build` and `make test` set up all they need, on a machine with Python 3.11.

PYTHON ?= python3
# Installed first, so that pip does not choose another; any release that pyproject.toml
# allows will do, with CUDA or without.
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: build test long format clean

build: $(INSTALLED)
	$(BIN)/mhcgen build specs/glm53.yaml

test: $(INSTALLED)
	$(BIN)/mhcgen build specs/*.yaml --check --no-compile
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest -n 2

long: $(INSTALLED)
	$(BIN)/pytest -n 2 -m long tests/emulator

format: $(INSTALLED)
	$(BIN)/ruff check --select I --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find mhcgen templates tests generated -name __pycache__ -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[test]"
	touch $@
