# make demo   prune the embedded model with and without DenoiseRotator
# make test   lint, types and tests
# Both make a virtual environment in .venv and install and build drot into it first.
#
# TORCH is the torch of .venv: any of 2.11 to 2.14, with CUDA or without. Another one than .venv has is
# installed in its place, and drot is built anew; where none is named, .venv keeps the one that it has.
PYTHON ?= python3
VENV ?= .venv
INSTALLED := $(shell cat $(VENV)/torch-installed 2> /dev/null)
TORCH ?= $(or $(INSTALLED),torch==2.13.0)
SOURCES := $(shell find csrc cmake drot -type f -not -name '*.pyc' -not -name '*.so') CMakeLists.txt setup.py pyproject.toml

.PHONY: demo test format clean

demo: $(VENV)/drot-installed
	rm -rf demo-output demo-output.partial demo-output.*.part
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
	rm -rf build demo-output demo-output.partial demo-output.*.part drot.egg-info $(VENV)

# torch first: drot is compiled against the torch that it will run with, hence without build isolation.
# The stamp names the torch that was installed to the end. `unfinished` stands while pip installs it: after
# a cut-off the environment is made afresh, since a package that is half there may pass for a whole one.
ifneq ($(INSTALLED),$(TORCH))
.PHONY: $(VENV)/torch-installed
endif
$(VENV)/torch-installed:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "drot needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1): make PYTHON=python3.12 ..." >&2; exit 2; }
	@echo "$(VENV) gets $(TORCH)$(if $(INSTALLED), in place of $(INSTALLED))"
	$(PYTHON) -m venv$(if $(wildcard $(VENV)/unfinished), --clear) $(VENV)
	@touch $(VENV)/unfinished
	$(VENV)/bin/pip install --quiet '$(TORCH)' 'setuptools>=77' wheel cmake ninja
	@rm $(VENV)/unfinished
	@echo '$(TORCH)' > $@

$(VENV)/drot-installed: $(VENV)/torch-installed $(SOURCES)
	$(VENV)/bin/pip install --quiet --no-build-isolation '.[dev]'
	touch $@
