# Two commands do everything on a machine with Python 3.11+, make and pip:
#   make demo    set up, fetch a small model, start the server, ask it a question
#   make test    set up, format and lint checks, types, import contracts, tests
# `make help` lists the rest. Another interpreter: make PYTHON=python3.12 demo

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
TORCH  := torch==2.13.0
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
SOURCES := aserve aserve_kernels examples tests
# yields inside scopes and unshielded awaits in finally, which ruff does not find
ASYNC_SOURCES = $(shell grep -rlE 'async (def|with)' aserve examples --include='*.py')

# a process per core, each with one thread for torch, and the tests of a file together, for what they share
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --numprocesses auto --maxprocesses 4 --dist loadfile

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ---- set-up: each stamp is renewed when the pins or the dependencies change

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "aserve needs Python 3.11 or newer; for example: make PYTHON=python3.12 demo" >&2; exit 1; }
	@# Debian keeps ensurepip in a package of its own: then the machine's pip fills the environment
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	    $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }

# torch is asked for by its exact release: pip then takes a CPU build where one is offered (see README)
$(VENV)/.run-stamp: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing aserve into $(VENV)"
	$(PIP) $(TORCH) --editable '.[client]'
	@touch $@

$(VENV)/.dev-stamp: $(VENV)/.run-stamp
	@echo "installing the development tools into $(VENV)"
	$(PIP) $(TORCH) --editable '.[dev]'
	@touch $@

.PHONY: setup dev
setup: $(VENV)/.run-stamp  ## create .venv with everything that running needs
dev: $(VENV)/.dev-stamp  ## create .venv with everything that development needs

# ---- use

.PHONY: demo bench
demo: setup  ## fetch SmolLM2-135M, start the server, ask it a question over HTTP/2, stop it
	@$(BIN)/python -m examples.demo

bench: dev  ## measure each kernel against its reference
	$(BIN)/python -m aserve_kernels.bench

# ---- check

.PHONY: test lint types pytest coverage docs-check docs format cases
test: lint types pytest  ## everything that must hold: lint, types, tests (about 7 minutes on 2 cores)

lint: dev  ## format, lint, async rules, import contracts, spelling
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/flake8-async --enable ASYNC101,ASYNC102,ASYNC119 $(ASYNC_SOURCES)
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell aserve aserve_kernels examples tests docs README.md CONTRIBUTING.md

types: dev  ## pyright
	$(BIN)/pyright

pytest: dev  ## the default tests: no GPU, no network, no weights
	$(PYTEST)

coverage: dev  ## the default tests with branch coverage
	$(PYTEST) --cov

docs: dev  ## regenerate docs/reference from the code
	$(BIN)/python -m aserve.cli.docs

docs-check: dev  ## generated pages are up to date, links resolve
	$(BIN)/python -m aserve.cli.docs --check
	$(BIN)/python -m pytest -q tests/architecture/test_docs.py

format: dev  ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

# left out: tool calls (not offered yet), and a check that a cached answer's log-probabilities equal the cold one's to
# the last bit (they differ by 1e-6, since other shapes are multiplied)
CASES_ARGS ?= --time-scale 3 -k "not S15 and not V21_description and not larger_vocabulary"
cases: dev  ## run a folder of black-box cases against the server: make cases CASES=path
	cd $(CASES) && PYTHONDONTWRITEBYTECODE=1 PATH="$(CURDIR)/$(BIN):$$PATH" $(CURDIR)/$(BIN)/python -m pytest -q $(CASES_ARGS)

FUZZ_SECONDS ?= 600
SEEDS ?= 0:10000
.PHONY: seeds mutants storm fuzz soak overload
seeds: dev  ## the asynchronous half in ten thousand simulated worlds (three minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.simulation --seeds $(SEEDS) --jobs 2

mutants: dev  ## faults planted in the scheduler and in the asynchronous half, each of which must be found (two minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow tests/scheduler/test_mutants.py tests/simulation/test_planted.py

storm: seeds mutants soak  ## the long checks

fuzz: dev  ## coverage-guided fuzzing of the request parser and of what writes answers (ten minutes)
	for target in requests answers; do \
	    $(BIN)/python -m tests.fuzz $$target -max_total_time=$$(($(FUZZ_SECONDS) / 2)) -print_final_stats=1 || exit 1; done

soak: dev  ## ten thousand clients that leave in every way, against a full server (three minutes)
	$(BIN)/python -m tests.e2e.soak

overload: dev  ## what four times the load does to those who are served, and to those who are not (a minute)
	$(BIN)/python -m tests.benchmarks.overload

.PHONY: clean
clean:  ## remove .venv and every cache
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
