# Everything runs in .venv, which the first target makes; ARGS is handed on: make test ARGS="-k spec -x".
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
ARGS ?=
# Files of tests that run beside each other: ranks wait for each other and for their start much of the time. 0 runs one
# after the other, as times want it.
WORKERS ?= 2
BIN := .venv/bin
# What ranks of several machines do too: training, meshes, experts, pipelines, reshards.
WIRED := $(addprefix tests/,dist/laws/test_one_process.py dist/laws/test_bitwise.py dist/train/test_exact_sums.py \
  dist/formats/test_loss_scaling.py dist/laws/test_init.py dist/train/test_unlike_parameters.py dist/laws/test_bytes.py \
  dist/laws/test_counts.py dist/laws/test_purity.py dist/train/test_by_hand.py dist/models/test_every_mesh.py \
  dist/models/test_mesh_laws.py dist/models/test_model_axes.py dist/ops/test_moe.py dist/models/test_moe.py \
  dist/pipeline/test_executor.py dist/train/test_reshard.py dist/laws/test_reshard.py \
  dist/comm/test_rows.py property/laws/test_training_cases.py property/ops/test_moe.py)
# Tests that start few ranks or none: as many at once as there are cores.
RANKLESS := tests/unit tests/test_examples.py tests/test_house_rules.py
# `make test`: each module by itself, and every law with few examples on few meshes.
QUICK := $(RANKLESS) tests/property tests/dist/laws
# Stamps are written last, so that an interrupted install is done again. The first is of what `make train` runs, the other
# of what tests, lint and pages need as well.
STAMP := .venv/.installed
ALL_STAMP := .venv/.installed-all
INSTALL := PIP_REQUIRE_VIRTUALENV=1 $(BIN)/python -m pip install -c constraints.txt
# True inside a whole venv only: a half-made one can lead to the system's Python, where nothing may be installed.
IS_VENV := import pip, sys; sys.exit(sys.prefix == sys.base_prefix)

# The newest torch that the tests ran with. `make test-torch` has an environment of its own for each version, with the
# newest releases of everything else; remove it to take newer ones.
TORCH ?= 2.15.0
TORCH_VENV := .venv-torch-$(TORCH)
TORCH_STAMP := $(TORCH_VENV)/.installed

.PHONY: help venv train test test-laws test-torch test-wire test-full lint docs clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | while IFS=$$'\t' read -r name text; do printf '%-10s %s\n' "$$name" "$$text"; done

venv: $(ALL_STAMP) ## make .venv, or bring it up to date with pyproject.toml and constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@rm -f $@
	@echo "== .venv: the package, torch and matplotlib; 1.1 GB with torch for the CPU, a minute or more"
	@$(BIN)/python -c '$(IS_VENV)' 2>/dev/null || $(PYTHON) -m venv --clear .venv
	$(INSTALL) -e '.[plot]'
	@touch $@

$(ALL_STAMP): $(STAMP)
	@rm -f $@
	@echo "== .venv: what the tests need as well; 1.5 GB, two minutes or more"
	$(INSTALL) -e '.[test,plot]'
	@touch $@

train: $(STAMP) ## train the tiny preset on two local ranks, into runs/tiny
	$(BIN)/fsharding train --preset tiny --ranks 2 --strategy zero3 --steps 200 --out runs/tiny $(ARGS)

test: $(ALL_STAMP) ## run the quick tests: each module by itself, and every law; or those of ARGS
ifeq ($(ARGS),)
	HYPOTHESIS_PROFILE=quick $(BIN)/pytest -n auto -m 'not full and not slow' $(QUICK)
else
	HYPOTHESIS_PROFILE=ci $(BIN)/pytest -n $(WORKERS) $(ARGS)
endif

test-laws: $(ALL_STAMP) ## run all tests but those marked full: every law on every kind of mesh
	HYPOTHESIS_PROFILE=ci $(BIN)/pytest -n $(WORKERS) $(addprefix --ignore=,$(RANKLESS))
	HYPOTHESIS_PROFILE=ci $(BIN)/pytest -n auto $(RANKLESS)

$(TORCH_STAMP): pyproject.toml
	@rm -f $@
	@$(TORCH_VENV)/bin/python -c '$(IS_VENV)' 2>/dev/null || $(PYTHON) -m venv --clear $(TORCH_VENV)
	PIP_REQUIRE_VIRTUALENV=1 $(TORCH_VENV)/bin/python -m pip install -q --upgrade torch==$(TORCH) -e '.[test,plot]'
	@touch $@

test-torch: $(TORCH_STAMP) ## run what test-laws does with another torch, in an environment of its own: make test-torch TORCH=2.15.0
	PATH="$(abspath $(TORCH_VENV))/bin:$$PATH" HYPOTHESIS_PROFILE=ci $(TORCH_VENV)/bin/pytest -n $(WORKERS) $(ARGS)

test-wire: $(ALL_STAMP) ## run the tests of ranks again with every byte sent, as between machines: no shared memory
	FSHARDING_SHARED_MEMORY=0 HYPOTHESIS_PROFILE=ci $(BIN)/pytest -n $(WORKERS) $(ARGS) $(WIRED)

test-full: $(ALL_STAMP) ## run the tests with many more examples, those marked full, and all with the newest torch
	HYPOTHESIS_PROFILE=full $(BIN)/pytest -n $(WORKERS) -m '' --timeout 1200 $(ARGS)
	$(MAKE) test-torch

lint: $(ALL_STAMP) ## ruff, formatting, spelling, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/basedpyright --pythonpath $(BIN)/python

docs: $(ALL_STAMP) ## build the pages into site/
	$(INSTALL) -q -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## remove .venv, caches and builds; runs/ stays
	rm -rf .venv .venv-torch-* .pytest_cache .ruff_cache .hypothesis build dist site *.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
