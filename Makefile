# Everyday commands. `make smoke` and `make test` create the environment if it is missing.
SHELL := /bin/bash
PY := .venv/bin/python
EXPERIMENT ?= smoke
ARGS ?=
RUN ?= runs/smoke
RUNS ?=
PART ?=
# The tests run in more processes than there are cores, because many of them wait for processes to
# start. Each process collects and runs a lane of its own: the folders that tests/selection.py gives it.
LANES ?= $(shell [ "$$(nproc)" -gt 1 ] && echo 3 || echo 2)
PYTEST = $(PY) -m pytest -n $(LANES) --dist each --max-worker-restart 0 -o console_output_style=classic
NOT_SLOW := not gpu and not slurm and not slow and not tools
# With PY=python3 they need only torch, Triton, transformers, megatron-core, pytest and hypothesis.
GPU_TESTS := tests/gpu tests/actor tests/reshard/transports

.PHONY: help env model smoke train preflight report compare scoreboard test test-all test-extended test-tools test-peers test-packages test-gpu test-slurm test-slow lint clean

help: ## print this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

env: ## create .venv and install bubblewrap and libseccomp (DEVICE=cpu|gpu, PYTHON=..., WITH_TE=1, ...: tools/setup_env.sh)
	@tools/setup_env.sh

model: env ## create the tiny model and the data of the smoke run under runs/toolqa
	@$(PY) tools/make_tiny_model.py --out runs/toolqa
	@$(if $(findstring experiment=smoke_openai,$(ARGS)),$(PY) tools/make_tiny_model.py --out runs/toolqa_chat --task toolqa_chat)
	@$(if $(findstring experiment=smoke_calls,$(ARGS)),$(PY) tools/make_tiny_model.py --out runs/calls --task calls)
	@$(if $(findstring experiment=smoke_orders,$(ARGS)),$(PY) tools/make_tiny_model.py --out runs/orders --task orders)
	@$(if $(findstring experiment=smoke_moe,$(ARGS)),$(PY) tools/make_tiny_model.py --out runs/moe --num-experts 8)
	@$(if $(findstring experiment=smoke_lora,$(ARGS)),test -f runs/smoke_sft/model/config.json || $(PY) -m mega_agentrl experiment=smoke_sft)
	@$(if $(findstring experiment=smoke_vision,$(ARGS)),$(PY) tools/make_tiny_model.py --out runs/vision --task vision)

smoke: model ## run the main job on this machine: an agent learns to use its tools
	@$(PY) -m mega_agentrl experiment=$(EXPERIMENT) $(ARGS)

train: $(if $(findstring experiment=smoke,$(ARGS)),model,env) ## run any training: make train ARGS="experiment=... key=value ..."
	@$(PY) -m mega_agentrl $(ARGS)

preflight: env ## check whether a configuration can run: make preflight ARGS="experiment=... model.path=..."
	@$(PY) tools/preflight.py $(ARGS)

report: env ## write the report page of a run: make report RUN=runs/smoke
	@$(PY) tools/report.py $(RUN)

compare: env ## print one table over runs or sweeps: make compare RUNS="runs/a runs/b"
	@$(PY) tools/compare_runs.py $(RUNS)

scoreboard: env ## train every algorithm on every task, for hours, into docs/scoreboard.md (ARGS="..." to compare_algos)
	@$(PY) tools/make_tiny_model.py --out runs/toolqa
	@$(PY) tools/make_tiny_model.py --out runs/calls --task calls
	@$(PY) tools/make_tiny_model.py --out runs/orders --task orders
	@$(PY) tools/compare_algos.py --page docs/scoreboard.md --results docs/scoreboard.jsonl $(ARGS)

test: env ## run the pure tests and one path through each system (ARGS="..." to pytest, LANES=3 processes)
	@$(PYTEST) -m "$(NOT_SLOW) and not extended" $(ARGS)

test-all: env ## run all tests that are not slow
	@$(PYTEST) -m "$(NOT_SLOW)" $(ARGS)

test-extended: env ## run what `make test-all` has beyond `make test`
	@$(PYTEST) -m "$(NOT_SLOW) and extended" $(ARGS)

test-tools: env ## run each script under tools/ in a small form (PART=K/N: part K of N, from 0)
	@$(PY) -m pytest -m "tools and not gpu" $(if $(PART),--part $(PART)) tests/tools $(ARGS)

test-peers: env build/peers/.installed ## compare algorithms, rewards and parsers with verl, TRL, OpenRLHF, bfcl-eval and math-verify
	@$(PY) -m tests.peers build/peers $(ARGS)

test-packages: env ## install agents, environments and MCP servers of others into build/packages and run a session with each
	@$(PY) -m pytest -m packages tests/packages $(ARGS)

build/peers/.installed: tests/peers/requirements.txt
	@rm -rf build/peers
	@$(PY) -m pip install -q --no-deps --no-compile --target build/peers -r $<
	@touch $@

test-gpu: $(if $(filter .venv/%,$(PY)),env) ## run the GPU tests that this machine can run, list the others with the reason (PY=python3: without .venv)
	@$(PY) -m pytest -m "gpu and not slurm" -rs $(GPU_TESTS) $(ARGS)

test-slurm: env ## test launching on a real Slurm of two virtual nodes (WITH_TOOLS=1 installs it)
	@$(PY) -m pytest -m "slurm and not slow" tests/slurm $(ARGS)

test-slow: env ## run the tests that take minutes (PART=K/N)
	@$(PY) -m pytest -m "slow and not gpu and not tools" $(if $(PART),--part $(PART)) $(ARGS)

lint: env ## run ruff, mypy and the import contracts
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@.venv/bin/lint-imports

clean: ## remove build files and caches, except .venv and runs
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
