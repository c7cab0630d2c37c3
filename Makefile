# `make test` and `make demo` do all the set-up: they need Python, make and git, nothing else.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
TESTS := $(BIN)/python -m pytest -q -n 2 --dist worksteal -o tmp_path_retention_policy=failed

# Small tensor operations are many times slower with several threads; cores go to processes.
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1
# Tests start many programs; without bytecode each of them would compile the tree.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test quick nightly fault soak lint bench study docs fmt clean

help: ## list these targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile

demo: $(READY) ## audit and grow a network, train a controller, write a report
	@$(BIN)/esper demo

test: lint ## run every check and every test but those of `make nightly`
	@$(TESTS)
	@echo 'Exhaustive forms of these tests are in "make nightly".'

quick: $(READY) ## the part of the tests that takes a minute, for while you work
	@$(BIN)/ruff check -q
	@$(TESTS) -m "not slow and not nightly"

nightly: $(READY) ## run the exhaustive forms of the tests, which `make test` leaves out
	@$(TESTS) -m nightly

fault: $(READY) ## the whole matrix of faults, broken guards, kills and damage; a quarter of an hour
	@rm -f .venv/matrix.json
	@ESPER_MATRIX=.venv/matrix.json ESPER_FAULTS=1002 ESPER_KILLS=60 \
		ESPER_FUZZ=5000 ESPER_KEYS=1000 ESPER_READS=10000 $(TESTS) -m "" \
		tests/faults tests/tolaria/test_governor.py tests/simic/training/test_kill.py tests/simic/training/test_fuzz.py
	@mv .venv/matrix.json docs/reliability.json
	@$(BIN)/python -m tests.faults.mutations
	@$(BIN)/python -m tests.faults.agents
	@$(BIN)/python docs/generate.py

soak: $(READY) ## an hour of training and of growing, side by side: memory, open files, disk
	@$(BIN)/python -m tests.faults.soak 3600 docs/soak.json
	@$(BIN)/python docs/generate.py

lint: $(READY) ## check style, types and the direction of imports
	@$(BIN)/ruff check -q
	@$(BIN)/ruff format -q --check || { echo 'Run "make fmt" to format the tree.'; exit 1; }
	@$(BIN)/mypy
	@report=$$($(BIN)/lint-imports --no-logo --no-cache 2>&1) || { echo "$$report"; exit 1; }

bench: $(READY) ## run every script in benchmarks/
	@for script in benchmarks/[!_]*.py; do echo "$$script"; $(BIN)/python "$$script" || exit 1; done

study: $(READY) ## the smallest form of both studies, into study-c1 and study-c2
	@$(BIN)/python -m studies c1 --size quick
	@$(BIN)/python -m studies c2 --size quick

docs: $(READY) ## the documentation as a site, into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo 'Open site/index.html; searching needs a server: $(BIN)/mkdocs serve'

fmt: $(READY) ## format the tree and fix what can be fixed safely
	@$(BIN)/ruff check -q --fix-only
	@$(BIN)/ruff format -q

clean: ## remove the virtual environment and all caches
	@rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis dist site
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment is made anew whenever it is out of date, so that it holds the pins and nothing
# left over; the last line marks it as usable, so an interrupted set-up starts again.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo \
		'Esper needs Python 3.11 or newer, which "$(PYTHON)" is not: name another, as in "make test PYTHON=python3.12".' >&2; exit 1; }
	@echo 'Setting up .venv (a minute or two) ...'
	@$(PYTHON) -m venv --clear .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt hatchling
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt \
		--no-build-isolation -e '.[dev]'
	@touch $@
