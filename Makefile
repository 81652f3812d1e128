# Two commands a new user needs: `make demo` and `make test`. Both create .venv and install everything first.
#
#   make demo                   what the package does, on this machine
#   make test                   the whole test suite (GPU tests skip with a reason where there is no GPU)
#   make test TESTS=tests/unit  part of it; PYTEST_ARGS adds options
#   make lint                   what pre-commit checks
#
# PYTHON=...  interpreter the environment is made from. If it can already import torch, that torch is used.
# VENV=       (empty) makes no environment: PYTHON must have everything, the package runs from this checkout.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
JOBS ?= 2
TESTS ?=
PYTEST_ARGS ?= -q

ifeq ($(strip $(VENV)),)
PY := PYTHONPATH=$(CURDIR) $(PYTHON)
INSTALLED :=
else
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
endif

.PHONY: demo test lint install clean
.DEFAULT_GOAL := test

install: $(INSTALLED)

# torch comes first and alone, so that a build that is already there (or asked for by TORCH) is kept.
$(VENV)/.installed: pyproject.toml version.txt build_backend.py
	@if $(PYTHON) -c "import torch" 2>/dev/null; then \
	  echo "using the torch of $(PYTHON)"; \
	  $(PYTHON) -m venv --system-site-packages $(VENV); \
	else \
	  $(PYTHON) -m venv $(VENV) && $(VENV)/bin/python -m pip install -q "$(TORCH)"; \
	fi
	$(VENV)/bin/python -m pip install -q "setuptools>=77" wheel
	$(VENV)/bin/python -m pip install -q --no-build-isolation -e ".[dev]"
	$(VENV)/bin/python -m pip install -q --no-deps flashinfer-bench
	@touch $@

demo: $(INSTALLED)
	$(PY) -m examples.demo

test: $(INSTALLED)
	$(PY) -m pytest $(PYTEST_ARGS) -n $(JOBS) $(TESTS)

lint: $(INSTALLED)
	$(PY) -m pre_commit run -a

clean:
	rm -rf build dist *.egg-info flashinfer/data flashinfer/_build_meta.py
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
