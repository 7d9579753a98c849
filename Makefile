# atoll: everything a developer or a first-time user runs. `make` alone lists it.
#
# Needs Python 3.11 or newer with its venv module, and make. Variables, given as `make swarm NODES=6`:
#   PYTHON   the interpreter that creates the environment (default: the first suitable one on the PATH)
#   VENV     where the environment is (default: .venv)
#   NODES    node processes of `make swarm` (default: 4)
#   ARGS     more arguments for `atoll swarm`, or for pytest in `make test`
# pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, PIP_CERT, ...) are honoured.

PYTHON ?=
VENV ?= .venv
NODES ?= 4
ARGS ?=

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:

BIN := $(VENV)/bin
STAMP := $(VENV)/.atoll-installed
# Stands while an installation is under way. Found by the next run, it means that the last one was interrupted.
UNDER_WAY := $(VENV)/.atoll-installing
SOURCES := src protocol node bootstrap tests bench

.PHONY: help
help: ## list these targets
	@echo "usage: make TARGET"
	@echo
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' Makefile

.PHONY: install
install: $(STAMP) ## create the environment with atoll and the development tools (the others do so when needed)

.PHONY: swarm
swarm: $(STAMP) ## train a model with four nodes on this machine, about four minutes after installation
	$(BIN)/atoll swarm --nodes $(NODES) $(ARGS)

.PHONY: test
test: $(STAMP) ## all tests: unit, simulated swarm, real processes
ifeq ($(ARGS),)
	# What only computes shares the cores; swarms of real processes have them for themselves.
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --durations=15 tests/unit tests/simulated
	$(BIN)/python -m pytest --durations=15 tests/real
else
	$(BIN)/python -m pytest --durations=15 $(ARGS)
endif

# seeds that once found something (docs/churn.md)
FOUND = 5024,6045,6046,20085,22149,23372
.PHONY: churn
churn: $(STAMP) ## simulated swarms under every kind of fault, a fixed set of seeds, about a minute
	$(BIN)/python -m tests.churn --peers 3..8 --rounds 25 --step-time 0.5 --vary --seeds 1..12
	$(BIN)/python -m tests.churn --peers 4..8 --rounds 25 --step-time 0.5 --vary --overlap 20 --fragments 4 --seeds 1..8
	$(BIN)/python -m tests.churn --peers 8 --rounds 40 --faults crash,power,freeze --seed 1
	$(BIN)/python -m tests.churn --peers 32 --rounds 4 --step-time 2 --every 15 --back 20 --seed 3
	$(BIN)/python -m tests.churn --peers 8..12 --rounds 100 --step-time 0.5 --vary --seeds $(FOUND)

.PHONY: lint
lint: $(STAMP) ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: types
types: $(STAMP) ## mypy, strict for protocol/
	$(BIN)/mypy

.PHONY: format
format: $(STAMP) ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: wheel
wheel: $(STAMP) ## build dist/*.tar.gz and, from it, dist/*.whl
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python tests/check_wheel.py dist/*.whl

.PHONY: clean
clean: ## remove what was built and cached (not the environment, not the results of runs)
	rm -rf build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: distclean
distclean: clean ## remove the environment too
	test ! -e "$(VENV)" || test -e "$(VENV)/pyvenv.cfg"
	rm -rf "$(VENV)"

# The environment. The stamp is the last thing written, so an installation that was interrupted is redone from nothing;
# one that is merely older than its two inputs is brought up to date in place.
$(STAMP): pyproject.toml constraints.txt
	@set -eu; \
	suitable() { "$$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }; \
	python='$(PYTHON)'; \
	if [ -n "$$python" ]; then \
	    command -v "$$python" >/dev/null 2>&1 || { \
	        echo "atoll: there is no '$$python' (PYTHON=$$python); name a Python 3.11 or newer" >&2; exit 1; }; \
	    suitable "$$python" || { \
	        echo "atoll needs Python 3.11 or newer; '$$python' is $$("$$python" --version 2>&1)." >&2; \
	        echo "Name another one: make PYTHON=/path/to/python3.11" >&2; exit 1; }; \
	else \
	    for candidate in python3.11 python3 python3.12 python3.13 python3.14 python; do \
	        if suitable "$$candidate"; then python=$$candidate; break; fi; \
	    done; \
	    if [ -z "$$python" ]; then \
	        found=$$(python3 --version 2>&1) || found="none"; \
	        echo "atoll needs Python 3.11 or newer; found on the PATH: $$found." >&2; \
	        echo "Install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; \
	    fi; \
	fi; \
	if [ -d "$(VENV)" ] && [ ! -e "$(VENV)/pyvenv.cfg" ] && [ -n "$$(find "$(VENV)" ! -type d | head -n 1)" ]; then \
	    echo "atoll: '$(VENV)' is there and is no Python environment; remove it or name another: make VENV=..." >&2; exit 1; \
	fi; \
	if [ -e "$(UNDER_WAY)" ] || ! suitable "$(BIN)/python" || ! "$(BIN)/python" -m pip --version >/dev/null 2>&1; then \
	    echo "atoll: creating $(VENV) with $$("$$python" --version 2>&1)"; \
	    "$$python" -m venv --clear "$(VENV)" || { \
	        echo "atoll: '$$python' cannot create an environment; it lacks the venv module." >&2; \
	        echo "On Debian and Ubuntu: apt-get install $$("$$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')-venv" >&2; \
	        exit 1; }; \
	fi; \
	rm -f "$@"; : >"$(UNDER_WAY)"; \
	echo "atoll: installing with the versions of constraints.txt (the first time downloads PyTorch)"; \
	"$(BIN)/python" -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[dev]'; \
	rm -f "$(UNDER_WAY)"; : >"$@"
