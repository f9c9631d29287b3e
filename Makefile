# Everyday commands. `make smoke` and `make test` make the environment first when it is missing.
SHELL := /bin/bash
PY := .venv/bin/python
EXPERIMENT ?= smoke
ARGS ?=
RUN ?= runs/smoke
RUNS ?=
PART ?=
# Two processes take the files of tests in turn: most of them wait for a start or a deadline.
LANES ?= 2

.PHONY: help env model smoke train preflight report compare test test-gpu test-slurm test-slow lint clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

env: ## make .venv and install bubblewrap and libseccomp (DEVICE=cpu|gpu, PYTHON=..., TORCH_INDEX_URL=...)
	@tools/setup_env.sh

model: env ## make the tiny model and the data of the smoke run under runs/toolqa
	@$(PY) tools/make_tiny_model.py --out runs/toolqa

smoke: model ## the main job on this machine: an agent learns to use its tools
	@$(PY) -m mega_agentrl experiment=$(EXPERIMENT) $(ARGS)

train: env ## any run: make train ARGS="experiment=... key=value ..."
	@$(PY) -m mega_agentrl $(ARGS)

preflight: env ## whether a configuration can run: make preflight ARGS="experiment=... model.path=..."
	@$(PY) tools/preflight.py $(ARGS)

report: env ## the page of a run: make report RUN=runs/smoke
	@$(PY) tools/report.py $(RUN)

compare: env ## one table over runs or sweeps: make compare RUNS="runs/a runs/b"
	@$(PY) tools/compare_runs.py $(RUNS)

test: env ## the tests, without those marked gpu, slurm or slow (ARGS="..." to pytest, LANES=2 processes)
	@$(PY) -m pytest -n $(LANES) --dist loadfile --no-loadscope-reorder -m "not gpu and not slurm and not slow" $(ARGS)

test-gpu: env ## the tests that need GPUs, each where there are enough of them (says what it skips and why)
	@$(PY) -m pytest -m "gpu and not slurm" -rs $(ARGS)

test-slurm: env ## launching on a real Slurm of two virtual nodes (WITH_TOOLS=1 installs it)
	@$(PY) -m pytest -m "slurm and not slow" tests/slurm $(ARGS)

test-slow: env ## the tests that take minutes (PART=K/N: part K, from 0 on, of N)
	@$(PY) -m pytest -m "slow and not gpu" $(if $(PART),--part $(PART)) $(ARGS)

lint: env ## ruff, mypy, import contracts; whether every process collects the same tests
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@.venv/bin/lint-imports
	@$(PY) tools/check_collection.py

clean: ## remove what was made here, except .venv and runs
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
