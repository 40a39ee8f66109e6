# Two commands to start with: `make demo` and `make test`. Each target does its own set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_DOCS := $(VENV)/.ready-docs
# The extra `networks` without torchvision: its wheel may not fit the torch that is installed, and the tests need none.
NETWORKS := timm==1.0.22 segmentation-models-pytorch==0.5.0
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Two test workers of one thread each use two cores fully; more threads in each would only fight for them.
TEST_ENV := OMP_NUM_THREADS=1
TEST_ARGS ?= -n 2 --dist worksteal

.PHONY: help setup demo test test-full audit lint bench bench-full score bench-gpu docs dist constraints clean
.DEFAULT_GOAL := help

help: ## what each target does
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv with everything pinned (done once; again when the pins change)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "Python 3.11, 3.12 or 3.13 is needed: make setup PYTHON=python3.12"; exit 1; }
	@echo "setting up $(VENV): a few minutes the first time"
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --upgrade pip==25.3
	$(PIP_INSTALL) --editable . --group dev
	$(PIP_INSTALL) --no-deps $(NETWORKS)
	@touch $@

$(READY_DOCS): $(READY)
	$(PIP_INSTALL) --group docs
	@touch $@

demo: $(READY) ## slides in, trained classifier and report out, in a few minutes
	$(BIN)/wsi-train demo

test: $(READY) ## what CI runs
	$(TEST_ENV) $(BIN)/python -m pytest $(TEST_ARGS)

test-full: $(READY) ## the counts that the project promises; hours; writes benchmarks/results/
	$(TEST_ENV) $(BIN)/python -m pytest --full $(TEST_ARGS)

audit: $(READY) ## known weaknesses of the pinned dependencies, by pip-audit; needs the network
	$(BIN)/python -m venv $(VENV)/audit
	$(VENV)/audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	$(VENV)/audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip --strict --progress-spinner off

lint: $(READY) ## ruff, formatter, type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY) ## ten minutes of benchmarks
	$(BIN)/python -m benchmarks

bench-full: $(READY) ## all benchmarks: many hours; what is interrupted goes on where it can
	$(BIN)/python -m benchmarks --full

score: $(READY) ## one line: time and memory of a step in a quarter of plain PyTorch's memory, six networks
	$(BIN)/python -m benchmarks.score

bench-gpu: $(READY) ## what one CUDA device says in ten minutes, into benchmarks/results/gpu.json
	$(BIN)/python -m benchmarks.gpu

docs: $(READY_DOCS) ## the documentation, into site/
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet docs site

dist: $(READY) ## wheel and sdist, built and checked, into dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m venv $(VENV)/dist
	$(VENV)/dist/bin/python -m pip install --quiet --disable-pip-version-check twine check-wheel-contents
	$(VENV)/dist/bin/twine check --strict dist/*
	$(VENV)/dist/bin/check-wheel-contents dist/*.whl

constraints: $(READY) ## pin everything anew, keeping what need not change
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	cp constraints.txt $(VENV)/pins.txt
	echo "wsi-trainer @ file://$(CURDIR)" > $(VENV)/self.txt
	$(BIN)/uv pip compile pyproject.toml --universal --all-extras --group dev --group docs \
	  --override $(VENV)/self.txt --no-emit-package wsi-trainer --no-emit-package torchvision --python-version 3.11 --quiet \
	  --no-annotate --no-header --output-file $(VENV)/pins.txt
	grep '^#' constraints.txt > $(VENV)/constraints.txt
	grep -vE '^(#|nvidia-|cuda-|triton==|timm==|segmentation-models-pytorch==)' $(VENV)/pins.txt >> $(VENV)/constraints.txt
	mv $(VENV)/constraints.txt constraints.txt

clean: ## remove the environment and what builds made
	rm -rf $(VENV) .peers build dist site .pytest_cache .mypy_cache .ruff_cache
