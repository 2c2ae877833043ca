# One virtual environment serves every target. It is made once and made again only when
# what it is built from has changed.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.installed-bench
PIP := $(PY) -m pip --disable-pip-version-check --quiet
JOBS ?= auto
DATA ?=

.PHONY: demo test test-torch test-long lint format bench clean

demo: $(STAMP)
	$(PY) examples/demo.py $(if $(DATA),--data "$(DATA)")

test: $(STAMP)
	$(PY) -m pytest -n $(JOBS) -m "not long"

# The same suite with what takes the place of the compiled core where it is missing; without what
# kills processes, and what converts corpora, neither of which asks for the core.
test-torch: $(STAMP)
	REPLAYKIT_NATIVE=0 $(PY) -m pytest -n $(JOBS) -m "not long" --ignore=tests/crash \
	  --ignore=tests/benchmarks --ignore=tests/datasets --ignore=tests/inspection --ignore=tests/cli

test-long: $(STAMP)
	$(PY) -m pytest -n $(JOBS)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(STAMP)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

bench: $(BENCH_STAMP)
	$(PY) -m benchmarks

$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*) replaykit/_version.py \
          $(wildcard replaykit/*/__init__.py)
	@echo "Setting up $(VENV) (a few minutes the first time) ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "replaykit needs Python 3.10 or newer; set PYTHON=/path/to/python3"; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt -e '.[test,examples,ray,cli]'
	@touch $@

$(BENCH_STAMP): $(STAMP)
	@$(PIP) install -c constraints.txt -e '.[bench]'
	@touch $@

clean:
	rm -rf $(VENV) build dist demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
