# `make serve` is all a newcomer needs; everything lives in .venv, nothing is installed outside it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -P -m pip --disable-pip-version-check
# Versions come from constraints.txt: without it pip may fetch a torch with gigabytes of CUDA.
INSTALL := $(PIP) install --quiet --constraint constraints.txt
SERVE_FLAGS ?=
BENCH_FLAGS ?=

.PHONY: help install serve test check bench clean

help:
	@echo "make serve    install once, then serve the embedded model on http://127.0.0.1:8000"
	@echo "make install  create .venv and install Headrace"
	@echo "make test     install what the tests need and run them all"
	@echo "make check    lint and types"
	@echo "make bench    measure decode speed on this machine"
	@echo "make clean    remove .venv and caches"

install: $(VENV)/.installed

serve: $(VENV)/.installed
	@$(BIN)/headrace serve $(SERVE_FLAGS)

test: $(VENV)/.installed-tools
	@$(BIN)/pytest

check: $(VENV)/.installed-tools
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

bench: $(VENV)/.installed
	@$(BIN)/headrace bench engine $(BENCH_FLAGS)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Headrace needs Python 3.11 or newer; give one with make PYTHON=..."; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "installing Headrace and what it needs (torch is the large one; once only)"
	@$(INSTALL) --editable .
	@touch $@

$(VENV)/.installed-tools: $(VENV)/.installed
	@echo "installing what tests and checks need (once only)"
	@$(INSTALL) --editable '.[test,lint]'
	@touch $@
