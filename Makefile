# Two commands a new user needs: `make demo` and `make test`. Both first make .venv with everything.
#
#   make demo                   what the package does, on this machine
#   make test                   the test suite (GPU tests skip with a reason where there is no GPU)
#   make test TESTS=tests/unit  part of it; PYTEST_ARGS adds options
#   make test-gpu               what a GPU decides, spread over the GPUs that are visible
#   make docs                   the documents and the API reference as a site, in build/site/html
#   make lint                   what pre-commit checks
#
# PYTHON=...  interpreter to make the environment from; a torch that it can import is used.
# VENV=       (empty) make none: PYTHON has everything, the package runs from this checkout.
# JOBS=2      test processes, forks of the one that collects; empty: one, which also collects.
# PIP_ARGS=   options of pip; -q hides the names of what it downloads.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
JOBS ?= 2
TESTS ?=
PYTEST_ARGS ?= -q
PIP_ARGS ?=

# A pipe fails where one of its commands does.
SHELL := bash
.SHELLFLAGS := -o pipefail -c

ifeq ($(strip $(VENV)),)
PY := PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON)
INSTALLED :=
else
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
endif

.PHONY: demo test test-gpu docs lint install clean
.DEFAULT_GOAL := test

install: $(INSTALLED)

# torch comes first and alone, so that a build that is there (or asked for by TORCH) is kept.
# The compiler from PyPI is added only where no CUDA toolkit is found. pip names what it collects
# and downloads; what is there already is left out. A comma would end an argument of `call`.
EXTRAS := .[dev,docs]
install = echo "[$(1)/5] $(2)" && $(VENV)/bin/python -m pip install $(PIP_ARGS) $(3) \
  --disable-pip-version-check --progress-bar off | sed -u "/^Requirement already satisfied/d"

$(VENV)/.installed: pyproject.toml version.txt build_backend.py
	@echo "Making $(VENV) from $(PYTHON), once: five steps, minutes where torch is to be downloaded"
	@if $(PYTHON) -c "import torch" 2>/dev/null; then \
	  echo "[1/5] torch: the one of $(PYTHON)"; \
	  $(PYTHON) -m venv --system-site-packages $(VENV); \
	else \
	  $(PYTHON) -m venv $(VENV) && $(call install,1,$(TORCH),"$(TORCH)"); \
	fi
	@$(call install,2,tools that build the package,"setuptools>=77")
	@$(call install,3,this package and its tests,--no-build-isolation -e "$(EXTRAS)")
	@$(call install,4,flashinfer-bench,--no-deps flashinfer-bench)
	@if $(VENV)/bin/python -c "import flashinfer.jit.toolchain as t; t.require_toolkit()" 2>/dev/null; \
	then echo "[5/5] CUDA toolkit: found"; \
	else $(call install,5,CUDA toolkit,--no-build-isolation -e ".[cuda]"); fi
	@touch $@

demo: $(INSTALLED)
	@echo "Demo: importing torch and looking for a GPU ..."
	@$(PY) -m examples.serve.demo

test: $(INSTALLED)
	@echo "Tests: collecting ..."
	@PYTORCH_NVML_BASED_CUDA_CHECK=1 $(PY) -m pytest $(PYTEST_ARGS) --progress \
	  $(if $(JOBS),--fork $(JOBS) -p no:xdist) $(TESTS)

test-gpu: $(INSTALLED)
	@$(PY) -m tests.gpu_suite $(if $(TESTS),--tests $(TESTS)) $(filter-out -q,$(PYTEST_ARGS))

docs: $(INSTALLED)
	@$(PY) -m docs.site

lint: $(INSTALLED)
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m pre_commit run -a

clean:
	rm -rf build dist *.egg-info flashinfer/data flashinfer/_build_meta.py
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
