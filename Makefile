# Every target makes what it needs through `setup`.
#   PYTHON=python3.12   the Python that .venv is made for (3.10 to 3.13); a torch that it already has is kept
#   WHEELS=folder       install from that folder, without any package registry
#   TESTS="tests/plan"  what `make test` runs; ARGS="-k name" is handed to pytest
PYTHON ?= python3
VENV ?= .venv
WHEELS ?=
TESTS ?=
ARGS ?=
RUN := $(VENV)/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full test-gpu lint format bench clean

help:
	@echo "make demo       train a 10 M parameter GPT with interleaved offload on text found on this machine"
	@echo "make test       the test suite that CI runs"
	@echo "make test-full  the same with the long product tests"
	@echo "make test-gpu   the tests that need a GPU"
	@echo "make lint       ruff and the import contracts"
	@echo "make bench      the benchmarks, a small pass"
	@echo "make setup      only .venv, dependencies and the compiled extension (PYTHON=, WHEELS=)"
	@echo "make clean      remove .venv and everything that was built or written"

setup:
	@$(PYTHON) tools/setup_venv.py --venv $(VENV) $(if $(WHEELS),--wheels $(WHEELS))

demo: setup
	$(RUN) -m examples.demo.run --output out/demo $(ARGS)

test: setup
	$(RUN) -m pytest $(TESTS) $(ARGS)

test-full: setup
	$(RUN) -m pytest --full $(TESTS) $(ARGS)

test-gpu: setup
	$(RUN) -m pytest tests/gpu tests/multi_gpu $(ARGS)

lint: setup
	$(RUN) -m ruff check .
	$(VENV)/bin/lint-imports

format: setup
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: setup
	$(RUN) -m benchmarks --smoke $(ARGS)

clean:
	rm -rf $(VENV) build dist out *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f deep_offload/_C*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
