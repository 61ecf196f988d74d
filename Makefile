# make demo   prune the embedded model with and without DenoiseRotator
# make test   lint, types and tests
# Both make a virtual environment in .venv and install and build drot into it first.
#
# TORCH is the torch that a new .venv gets: any of 2.11 to 2.14, with CUDA or without.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
SOURCES := $(shell find csrc cmake drot -type f -not -name '*.pyc' -not -name '*.so') CMakeLists.txt setup.py pyproject.toml

.PHONY: demo test format clean

demo: $(VENV)/drot-installed
	$(VENV)/bin/drot demo --out demo-output

test: $(VENV)/drot-installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	git ls-files -z '*.cpp' '*.h' '*.cu' '*.cuh' | xargs -0 -r $(VENV)/bin/clang-format --dry-run --Werror
	$(VENV)/bin/mypy
	$(VENV)/bin/pytest --durations=15

format: $(VENV)/drot-installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	git ls-files -z '*.cpp' '*.h' '*.cu' '*.cuh' | xargs -0 -r $(VENV)/bin/clang-format -i

clean:
	rm -rf build demo-output drot.egg-info $(VENV)

# torch first: drot is compiled against the torch that it will run with, hence without build isolation
$(VENV)/torch-installed:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "drot needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1): make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet '$(TORCH)' 'setuptools>=77' wheel cmake ninja
	touch $@

$(VENV)/drot-installed: $(VENV)/torch-installed $(SOURCES)
	$(VENV)/bin/pip install --quiet --no-build-isolation '.[dev]'
	touch $@
