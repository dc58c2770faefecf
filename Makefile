# Set up, demo, tests. Everything is installed into .venv and nowhere else (test-extras: .venv-*).
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-extras lint check clean

VENV ?= .venv
TORCH ?= torch==2.14.1
EXTRAS ?= train,plots,dev
ALL_EXTRAS = $(shell sed -n '/^.project.optional/,/^$$/s/^\([a-z0-9]*\) = .*/\1/p' pyproject.toml | paste -sd,)
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

help: ## Show these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make .venv with all that training, decoding and testing need (6 GB, a few minutes)

$(STAMP): pyproject.toml tools/setup.sh
	@bash tools/setup.sh "$(VENV)" "$(TORCH)" "$(EXTRAS)"
	@touch $@

demo: setup ## Train, export and decode a small N-vium and its dense twin into runs/demo; SMOKE=1: a few steps
	$(PY) tools/demo.py $(if $(SMOKE),--smoke)

test: setup ## Run the tests; ARGS="tests/unit -k toml" picks some
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "not slow" -n auto --dist loadfile $(ARGS)

test-extras: ## Run the tests with every extra installed and with none, each in a .venv-* of its own
	$(MAKE) test VENV=.venv-extras EXTRAS=$(ALL_EXTRAS)
	$(MAKE) test VENV=.venv-bare EXTRAS=test

lint: setup ## Check format, style and types
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

check: lint test ## Run lint and test

clean: ## Remove caches, builds and the demo's output; environments and other runs stay
	rm -rf build dist runs/demo .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find nvium_titan tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
