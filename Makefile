# make demo   train a small language model with refluent and write a report
# make test   everything that CI runs: ruff, mypy, pytest with coverage
# Both make .venv first. Only Python 3.11 or 3.12, pip and make are needed.

# On Linux, PyPI's torch wheel brings CUDA libraries (several GB). For the CPU build, where that index is reachable:
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
TORCH_VERSION := 2.13.0

PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
comma := ,
INSTALL := $(PIP) install --constraint constraints.txt

.PHONY: demo test lint types pytest format clean
.DEFAULT_GOAL := test

demo: $(VENV)/.demo
	$(BIN)/refluent demo

test: lint types pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

# Two workers of one thread each: torch's own threads would fight over the cores.
pytest: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --cov --cov-report=term --cov-fail-under=90

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.python:
	@test -n "$(PYTHON)" || { echo "refluent needs Python 3.11 or 3.12: none found (say make PYTHON=/path/to/python3.11)" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.torch: $(VENV)/.python constraints.txt
	$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(TORCH_VERSION)
	touch $@

# On Linux the demo also runs the Blackwell kernel, emulated; elsewhere it says that it leaves that out.
$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(INSTALL) --editable '.[$(if $(filter Linux,$(shell uname)),demo$(comma)emulator,demo)]'
	touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(INSTALL) --editable '.[demo,emulator,dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .coverage .coverage.*
