# make demo    from a bare checkout to a trained tiny agent: make demo [SEED=0] [RUN=runs/tiny]
# make test    the test suite: make test [PYTEST="-k mesh"]
# make bench   side-by-side measurements; each script prints a table and one ratio
# make lint    style and types

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: demo test bench lint install

PYTHON ?= python3
VENV ?= .venv
SEED ?= 0
RUN ?= runs/tiny
PYTEST ?=
BIN := $(VENV)/bin

# XLA on CPU returns every large buffer to the system and page-faults its way through the next one.
# One arena that never shrinks roughly halves the time of a gradient step.
# Matrices of the tiny model are too small to share out: one thread needs a third less CPU time.
CPU := MALLOC_ARENA_MAX=1 MALLOC_MMAP_MAX_=0 \
	MALLOC_TRIM_THRESHOLD_=100000000000 MALLOC_TOP_PAD_=1000000000 NPROC=1

demo: install
	$(CPU) $(BIN)/python -m sspjax.demo --config=configs/tiny.py --workdir=$(RUN) \
		--config.seed=$(SEED)

test: install
	$(CPU) $(BIN)/python -m pytest $(PYTEST)

bench: install
	$(BIN)/pip install --quiet -e '.[bench]'
	for script in $(wildcard benchmarks/*.py); do $(CPU) $(BIN)/python "$$script"; done

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

install: $(VENV)/install.json

# The stamp holds what the installation took; the demo reports it.
$(VENV)/install.json: setup.py
	rm -rf $(VENV)
	mkdir -p $(VENV)
	exec 3>&2; TIMEFORMAT='{"seconds": %R, "user_seconds": %U, "system_seconds": %S}'; \
	{ time { $(PYTHON) -m venv $(VENV) && $(BIN)/pip install --quiet -e '.[test]'; } 2>&3; } 2> $@
