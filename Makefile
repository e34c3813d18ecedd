# The commands of the project. A commit must pass `make check`.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test check lint types wheel-check clean

demo: $(VENV)/demo  ## From nothing to a trained model and a sample.
	$(BIN)/gptfast prepare shakespeare --force
	$(BIN)/gptfast train --profile quick

# A process a core with one thread each: on tiny models more threads only wait for each other. Each
# begins with files of its own (worksteal), so that what the tests of a file share is made once.
test: $(VENV)/dev  ## The whole suite.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

check: lint types test wheel-check  ## All that a commit must pass.

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev
	$(BIN)/mypy

wheel-check: $(VENV)/dev  ## The wheel in a clean environment: prepare, two steps, plugins found.
	$(BIN)/python tests/wheel_check.py

clean:
	rm -rf $(VENV) build dist *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@
