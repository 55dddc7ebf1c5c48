# make train | test | test-all | check: each makes .venv first if need be. PYTHON=python3.12 chooses another Python.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
# Test files run side by side in so many processes; JOBS=0 runs all in one.
JOBS ?= 2
# What the tests need is installed beside the rest: PyTorch and MPI, to run schedules on their ranks, what judges texts and
# detections, what cuts text into tokens, and two experiment trackers. `make test EXTRAS=` leaves them out, and their tests
# are skipped.
EXTRAS ?= bench mpi bleu tasks detection text tpu micro data hub weights remote mlperf models ray wandb trackio

.PHONY: train test test-all check format install extras firmware-test docs wheel clean

train: install
	$(BIN)/multipod train digits $(ARGS)

# Under ten minutes on two quiet cores; test-all has what takes longer, too.
test: install extras
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not slow" $(ARGS)

test-all: install extras
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

# The embedded runtime on emulated chips; says which Debian packages it lacks, and installs none.
firmware-test: install extras
	$(BIN)/python c/firmware/measure.py $(ARGS)

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

install: $(VENV)/installed

# Made again when the dependencies change; the package itself is installed in place.
$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "multipod needs Python 3.11 or newer, and $(PYTHON) is older. Say make PYTHON=python3.12, for example."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

extras: $(EXTRAS:%=$(VENV)/%.extra)

# Not every machine has wheels of these: then the tests say what was left out.
$(VENV)/%.extra: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]' && touch $@ \
	  || echo "make: the extra '$*' could not be installed; the tests that need it are skipped."

# The documentation site, in docs/_build/html; a warning, as of a link that leads nowhere, is an error.
docs: $(VENV)/docs.extra
	@test -e $< || { echo "make docs needs the extra 'docs', which could not be installed."; exit 1; }
	$(BIN)/sphinx-build -q -W --keep-going docs docs/_build/html

# Wheels for Linux on x86-64 and on 64-bit ARM, with the compiled parts inside, in dist/.
wheel: $(VENV)/wheel.extra
	for machine in x86_64 aarch64; do MULTIPOD_WHEEL_FOR=$$machine $(BIN)/python -m hatchling build -t wheel || exit 1; done

clean:
	rm -rf $(VENV) docs/_build docs/api .mypy_cache .ruff_cache .pytest_cache .hypothesis
