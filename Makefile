# The first target used on a machine creates .venv from requirements.lock; the stamp is written last and carries the
# checksum of what was installed, so an interrupted installation is done again and a finished one never is.
PYTHON ?= python3.11
STAMP := .venv/.installed-$(shell cat requirements.lock pyproject.toml | cksum | cut -d' ' -f1)
RUN := .venv/bin/python
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: repro flow test lint
.DEFAULT_GOAL := repro

# `exec`: no shell stays between make and the driver, which ends with its parent.
repro: $(STAMP)
	@exec $(RUN) -m flows.repro

flow: $(STAMP)
	@exec $(RUN) -m flows.reproduce

test: $(STAMP)
	@echo "test: pytest, two files at a time"
	@exec $(RUN) -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

lint: $(STAMP)
	@echo "lint: ruff check"
	@$(RUN) -m ruff check .
	@echo "lint: ruff format"
	@$(RUN) -m ruff format --check .
	@echo "lint: mypy"
	@$(RUN) -m mypy normalign components flows tests benchmarks

$(STAMP): requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null && $(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { \
	    echo "install: Python 3.11 is needed and '$(PYTHON)' does not run it." >&2; \
	    echo "install: install Python 3.11, or name its binary: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; \
	    exit 1; }
	@rm -f .venv/.installed-*
	@echo "install: 1/3 .venv with $$($(PYTHON) --version)"
	@$(RUN) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	@echo "install: 2/3 requirements.lock ($$(grep -c == requirements.lock) packages, about 7 GB; minutes)"
	@$(RUN) -m pip install -r requirements.lock
	@echo "install: 3/3 this project, editable"
	@$(RUN) -m pip install --quiet --no-deps -e .
	@touch $@
	@echo "install: done"
