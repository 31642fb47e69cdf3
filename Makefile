PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup demo test test-lowest lint bench docs dist

setup: $(STAMP)

# Redone only when what is installed could have changed.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev]"
	touch $@

# Idle threads sleep instead of spinning, which on a busy machine is several times faster.
demo: setup
	OMP_WAIT_POLICY=PASSIVE $(BIN)/femixer argmax --overwrite

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/femixer bench layer

# The documentation into site/; a broken link or reference is an error. Look at it with: .venv/bin/python -m mkdocs serve
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Source distribution and wheel into dist/, checked as the package index checks them.
dist: DIST := .venv-dist
dist:
	test -x $(DIST)/bin/python || $(PYTHON) -m venv $(DIST)
	$(DIST)/bin/python -m pip install -q -c constraints.txt build hatchling hatch-fancy-pypi-readme twine
	rm -rf dist
	$(DIST)/bin/python -m build --no-isolation
	$(DIST)/bin/python -m twine check --strict dist/*

# The lowest versions that pyproject.toml allows (constraints-lowest.txt), in an environment of their own; minutes, not part of `make test`.
# Old packages warn of what newer ones below them deprecate; the test left out needs the extra eval.
LOWEST := .venv-lowest
LOWEST_TESTS := test_free_energy test_mixer test_softmax test_lm_model test_models test_lm_generate test_trainer test_training test_saving test_cli
test-lowest:
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install -c constraints-lowest.txt -e ".[lm]" pytest hypothesis
	OMP_NUM_THREADS=1 NUMBA_CACHE_DIR=$(LOWEST)/numba $(LOWEST)/bin/python -m pytest -p no:cacheprovider -W default $(LOWEST_TESTS:%=tests/%.py) \
		--deselect tests/test_saving.py::test_models_are_found_by_a_process_that_never_imports_femixer
