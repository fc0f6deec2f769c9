# `make demo` and `make test` need only python3 (3.11 or newer) with its venv module; everything else is installed
# into .venv. Set PYTHON=python3.12 to choose the interpreter.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
JOBS   ?= 2

.PHONY: help demo demo-parallel test test-long lint bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   train a small mixture of experts on this machine and look at the result"
	@echo "make demo-parallel   the same training on four processes, ending at the same loss"
	@echo "make test   lint, types and tests"
	@echo "make test-long   the tests that make test leaves out: every layout against one process"
	@echo "make lint   lint and types only"
	@echo "make bench  how to repeat the measurements of docs/benchmarks.md"
	@echo "make clean  remove .venv and caches"

demo: $(VENV)/.stamp-train
	$(BIN)/python examples/demo.py

demo-parallel: $(VENV)/.stamp-train
	$(BIN)/python examples/demo.py --layout 'pp2 dp2 / ep2'

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile -m "not long"

# One after the other: each of these keeps up to eight processes busy.
test-long: $(VENV)/.stamp-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m long

lint: $(VENV)/.stamp-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.stamp-test
	@echo "one layer beside its peers:  $(BIN)/python benchmarks/moe_layer.py --help"
	@echo "a whole training step:       $(BIN)/python benchmarks/train_step.py --help"

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "moesaic needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1): set PYTHON=…"; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
	  { echo "$(PYTHON) has no venv module: apt-get install python3-venv (or python3.x-venv), then again"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	touch $@

# --no-compile: Python compiles what it imports, and that is a small part of what torch brings.
define install
	$(BIN)/python -m pip install -q --no-compile --disable-pip-version-check -c constraints.txt -e '.[$(1)]'
	touch $@
endef

$(VENV)/.stamp-train: $(VENV)/.stamp-venv pyproject.toml constraints.txt
	$(call install,train)

$(VENV)/.stamp-test: $(VENV)/.stamp-venv pyproject.toml constraints.txt
	$(call install,test$(comma)dev)
	touch $(VENV)/.stamp-train

comma := ,
