# Set up, demo, tests. Everything is installed into .venv and nowhere else.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test lint check clean

VENV ?= .venv
TORCH ?= torch==2.14.1
EXTRAS ?= train,plots,dev
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

help: ## Show these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make .venv with all that training, decoding and testing need (6 GB, a few minutes)

$(STAMP): pyproject.toml tools/setup.sh
	@bash tools/setup.sh "$(VENV)" "$(TORCH)" "$(EXTRAS)"
	@touch $@

demo: setup ## Train, export and decode a small N-vium and its dense twin into runs/demo; SMOKE=1: a few steps
	$(PY) tools/demo.py $(if $(SMOKE),--smoke)

test: setup ## Run the tests; ARGS="tests/unit -k toml" picks some
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "not slow" -n auto --dist loadfile $(ARGS)

lint: setup ## Check format, style and types
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

check: lint test ## Run lint and test

clean: ## Remove caches, builds and the demo's output; .venv and other runs stay
	rm -rf build dist runs/demo .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find nvium_titan tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
