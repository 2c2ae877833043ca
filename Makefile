# One virtual environment serves every target. It is made once and made again only when
# what it is built from has changed.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.installed-bench
PIP := $(PY) -m pip --disable-pip-version-check --quiet
# One more than there are processors: a sixth of the time tests wait, for disks and other processes.
JOBS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
# Who is done takes work over from the others; until then files stay whole, and share what they need.
PARALLEL := -n $(JOBS) --dist worksteal
DATA ?=
# The suite has a time limit: what takes longest is told at its end.
SLOWEST := --durations=25 --durations-min=5

.PHONY: demo test test-programs test-torch test-long lint format bench clean

demo: $(STAMP)
	$(PY) examples/demo.py $(if $(DATA),--data "$(DATA)")

test: $(STAMP)
	$(PY) -m pytest $(PARALLEL) -m "not long and not programs" $(SLOWEST)

# What compiles, packs or runs whole programs: the core under sanitizers, the wheels, the demo, all
# benchmarks, with the core and without it side by side.
test-programs: $(STAMP)
	$(PY) -m pytest $(PARALLEL) -m "programs and not long" tests

# The same suite with what takes the place of the compiled core where it is missing; without what
# kills processes, what converts corpora, and what needs Ray, none of which asks for the core.
test-torch: $(STAMP)
	REPLAYKIT_NATIVE=0 $(PY) -m pytest $(PARALLEL) -m "not long and not programs" --ignore=tests/crash \
	  --ignore=tests/benchmarks --ignore=tests/datasets --ignore=tests/inspection --ignore=tests/cli \
	  --ignore=tests/remote --ignore=tests/sharding/test_actors.py \
	  $(SLOWEST)

test-long: $(STAMP)
	$(PY) -m pytest $(PARALLEL)

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
