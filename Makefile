# Two commands a new user needs: `make demo` and `make test`. Both first make .venv with everything.
#
#   make demo                   what the package does, on this machine
#   make test                   the test suite (GPU tests skip with a reason where there is no GPU)
#   make test TESTS=tests/unit  part of it; PYTEST_ARGS adds options
#   make lint                   what pre-commit checks
#
# PYTHON=...  interpreter to make the environment from; a torch that it can import is used.
# VENV=       (empty) make none: PYTHON has everything, the package runs from this checkout.
# JOBS=2      test processes (pytest-xdist); empty: one, without xdist.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
JOBS ?= 2
TESTS ?=
PYTEST_ARGS ?= -q

ifeq ($(strip $(VENV)),)
PY := PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON)
INSTALLED :=
else
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
endif

.PHONY: demo test lint install clean
.DEFAULT_GOAL := test

install: $(INSTALLED)

# torch comes first and alone, so that a build that is there (or asked for by TORCH) is kept.
# The compiler from PyPI is added only where no CUDA toolkit is found.
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
	$(VENV)/bin/python -c "import flashinfer.jit.toolchain as t; t.require_toolkit()" 2>/dev/null \
	  || $(VENV)/bin/python -m pip install -q --no-build-isolation -e ".[cuda]"
	@touch $@

demo: $(INSTALLED)
	$(PY) -m examples.serve.demo

test: $(INSTALLED)
	$(PY) -m pytest $(PYTEST_ARGS) $(if $(JOBS),-n $(JOBS)) $(TESTS)

lint: $(INSTALLED)
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m pre_commit run -a

clean:
	rm -rf build dist *.egg-info flashinfer/data flashinfer/_build_meta.py
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
