# Every target sets up what it needs: a virtual environment with the package, editable, and the console script remat-kit.
# Needed on the machine: python3 >= 3.11 (with venv) and make.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= gpu,tpu,train,dev
# Processes that pytest runs; each may compile, so more than cores is no gain.
JOBS ?= 2
PYTEST_ARGS ?=
# Which slow tests test-slow runs.
SLOW ?= slow

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-all lint format clean

help: ## List the targets.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 12

setup: $(STAMP) ## Make the environment $(VENV).

# Installs again only when what is installed may have changed.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "PYTHON=$(PYTHON) is not Python 3.11 or newer; name one: make PYTHON=python3.12 …" >&2; exit 1; }
	@echo "Installing into $(VENV): about 2.4 GB, some minutes the first time."
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || \
	    { echo "python -m venv failed: on Debian and Ubuntu, install python3-venv." >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

demo: $(STAMP) ## Compare six policies on three targets; no accelerator needed.
	$(BIN)/remat-kit compare models:gpt2_small --set batch=8 --set seq=1024 \
	    --target rtx3090 --target h100 --target v5e \
	    --policy none --policy full --policy dots --policy dots_no_batch --policy save_qkv_proj --policy minimal

test: $(STAMP) ## Tests and doctests, the slow ones left out.
	$(PYTEST) -m 'not slow'

test-slow: $(STAMP) ## The slow tests alone.
	$(PYTEST) -m '$(SLOW)'

test-all: test test-slow ## Every test.

lint: $(STAMP) ## Format, lint, types and import contracts, checked.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-cache

format: $(STAMP) ## Format, and fix what ruff can fix.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove the environments and what the tools left.
	rm -rf .venv .venv-* .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
