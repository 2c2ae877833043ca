# All targets except test-newest use one virtual environment. It is set up again only after a change
# of the files that it is built from.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.installed-bench
DOCS_STAMP := $(VENV)/.installed-docs
NEWEST := .venv-newest
NEWEST_STAMP := $(NEWEST)/.installed
LEROBOT := .venv-lerobot
LEROBOT_STAMP := $(LEROBOT)/.installed
LEROBOT_PIP := $(LEROBOT)/bin/python -m pip --disable-pip-version-check --quiet
NEWEST_PIP := $(NEWEST)/bin/python -m pip --disable-pip-version-check --quiet
PIP := $(PY) -m pip --disable-pip-version-check --quiet
# One more than the number of processors, because tests wait for disks and other processes during a
# sixth of their time.
JOBS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
# At first all tests of a file run in one worker, so that they share fixtures. Workers that have
# finished take tests from the others.
PARALLEL := -n $(JOBS) --dist worksteal
DATA ?=
# Bytecode is written in any case, or each worker compiles all tests and each process that a test
# starts compiles the package.
export PYTHONDONTWRITEBYTECODE :=
# The suite has a time limit, so each run ends with a list of the slowest tests.
SLOWEST := --durations=25 --durations-min=5

# Tests of the code that reads, builds or returns TensorDicts, without tests of processes and
# threads.
CORE := tests/storages tests/samplers tests/writers tests/transforms tests/trajectories \
  $(wildcard tests/test_schema*.py tests/test_mapping*.py) tests/test_structure.py \
  tests/test_default_device.py tests/test_ted.py \
  $(patsubst %,tests/buffer/test_%.py,added_columns conditional contiguous core delayed editing \
    episodes indexing iteration plain_values sampling saving \
    state_dict torchrl_ways transforms writing) \
  --ignore=tests/storages/test_native_threads.py --ignore=tests/storages/test_memmap_removal.py

.PHONY: demo docs docs-links examples wheel test test-lerobot test-newest test-programs test-long lint format bench clean

demo: $(STAMP)
	$(PY) examples/demo.py $(if $(DATA),--data "$(DATA)")

test: $(STAMP)
	$(PY) -m pytest $(PARALLEL) -m "not long and not programs" $(SLOWEST)

# Tests that compile, package or run whole programs: the core under sanitizers, the wheels, the
# demo, all benchmarks.
test-programs: $(DOCS_STAMP)
	$(PY) -m pytest $(PARALLEL) -m "programs and not long" tests

test-long: $(DOCS_STAMP)
	$(PY) -m pytest $(PARALLEL)

# The core of the suite with the newest tensordict that pip offers. All other packages have the
# versions of constraints.txt. The newest tensordict is installed last and without dependencies,
# because torchrl may require an older version. The run takes about five minutes on two processors.
# The first run takes a few minutes more for the setup.
test-newest: $(NEWEST_STAMP)
	@$(NEWEST_PIP) install --upgrade --no-deps tensordict
	@$(NEWEST)/bin/python -c 'import tensordict; print("tensordict", tensordict.__version__)'
	$(NEWEST)/bin/python -m pytest $(PARALLEL) -m "not long and not programs" $(SLOWEST) $(CORE)

# Every item of LeRobot's data sets, compared with LeRobot's own class. Its package is installed
# without its dependencies, which exclude the versions of constraints.txt; the list has those that
# its data sets import.
test-lerobot: $(LEROBOT_STAMP)
	$(LEROBOT)/bin/python -m pytest -W default tests/lerobot

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(STAMP)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

# The documentation site, with warnings as errors. Its first page is docs/_build/index.html.
docs: $(DOCS_STAMP)
	$(PY) -m sphinx -q -W --keep-going -b html docs docs/_build

# Links to other sites; needs the network.
docs-links: $(DOCS_STAMP)
	$(PY) -m sphinx -q --keep-going -b linkcheck docs docs/_build/links

# All programs of `examples/` that learn, each against its goal; about four minutes on two processors.
PROGRAMS := dqn_prioritized sac_hindsight roboset_offline memory_agent callbacks_trainer \
  recurrent_r2d2 ppo_drain atari_frames

examples: $(STAMP)
	@failed=; for program in $(PROGRAMS); do \
	  $(PY) examples/$$program.py || failed="$$failed $$program"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

# A wheel in `dist/`, which is installed without a compiler.
wheel: $(STAMP)
	$(PY) -m pip --disable-pip-version-check wheel . --no-deps --wheel-dir dist

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

$(DOCS_STAMP): $(STAMP)
	@$(PIP) install -c constraints.txt -e '.[docs]'
	@touch $@

$(BENCH_STAMP): $(STAMP)
	@$(PIP) install -c constraints.txt -e '.[bench]'
	@touch $@

$(NEWEST_STAMP): pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*) \
                 replaykit/_version.py $(wildcard replaykit/*/__init__.py)
	@echo "Setting up $(NEWEST) (a few minutes the first time) ..."
	@test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	@$(NEWEST_PIP) install -c constraints.txt -e '.[test,examples,ray,cli]'
	@touch $@

$(LEROBOT_STAMP): pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*) \
                  replaykit/_version.py $(wildcard replaykit/*/__init__.py)
	@echo "Setting up $(LEROBOT) (a few minutes the first time) ..."
	@test -x $(LEROBOT)/bin/python || $(PYTHON) -m venv $(LEROBOT)
	@$(LEROBOT_PIP) install -c constraints.txt -e '.[test,lerobot]'
	@$(LEROBOT_PIP) install accelerate deepdiff dill httpx jsonlines multiprocess 'numpy<2.4' \
	  pandas requests xxhash
	@$(LEROBOT_PIP) install --no-deps datasets==4.8.5 lerobot==0.4.4
	@touch $@

clean:
	rm -rf $(VENV) $(NEWEST) $(LEROBOT) build dist demo-output example-output \
	  docs/_build docs/benchmarks docs/datasets docs/figures docs/reference .pytest_cache .mypy_cache .ruff_cache .hypothesis
