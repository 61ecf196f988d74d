# make demo     prune the embedded model with and without DenoiseRotator
# make check    lint, types, and every test that is not marked `slow`: for while you work
# make test     lint, types and all tests
# make docs     build the site of the documentation in site/; a warning is an error
# make dist     write the sdist and, from the sdist, the wheel to dist/
# make format   let ruff and clang-format rewrite the sources
# make clean    delete the environment, the builds and the demo's output
#
# All but the last make a virtual environment in .venv. They build drot's native module into drot/ and install
# drot editable: `import drot` works in the checkout, and an edited Python file needs no new install.
#
# PYTHON is the Python that makes the environment, VENV the environment's folder.
# TORCH is the torch of the environment, any of 2.11 to 2.14, with CUDA or without. Where TORCH is not given,
# the environment keeps the torch that it has. Where another TORCH is given, make replaces the torch and
# builds drot again.
# DROT_WITH_CUDA=0 or 1 leaves the CUDA kernels out or demands them.
PYTHON ?= python3
VENV ?= .venv
INSTALLED := $(shell cat $(VENV)/torch-installed 2> /dev/null)
TORCH ?= $(or $(INSTALLED),torch==2.13.0)
# Everything that the native module or the package's metadata is made from. The module holds the version.
SOURCES := $(shell find csrc cmake -type f) CMakeLists.txt setup.py pyproject.toml drot/core/version.py

.PHONY: demo check test lint docs dist format clean

demo: $(VENV)/drot-installed
	rm -rf demo-output demo-output.partial demo-output.*.part
	$(VENV)/bin/drot demo --out demo-output

# Two processes of one thread each: threads gain little in small tests, and two processes of two threads each
# would wait for each other. A few tests set more threads; passive ones leave the cores to the other process
# while they wait. `make demo` runs with torch's own number of threads, as drot does for its users.
# With the empty variable pytest keeps the bytecode of the tests, which takes each process five seconds to make.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OMP_WAIT_POLICY=passive \
  $(VENV)/bin/pytest -n 2 --dist worksteal

check: lint
	$(PYTEST) -m 'not slow' --durations=5 --durations-min=2

test: lint
	$(PYTEST) --durations=15

lint: $(VENV)/drot-installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	git ls-files -z '*.cpp' '*.h' '*.cu' '*.cuh' | xargs -0 -r $(VENV)/bin/clang-format --dry-run --Werror
	$(VENV)/bin/mypy

format: $(VENV)/drot-installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	git ls-files -z '*.cpp' '*.h' '*.cu' '*.cuh' | xargs -0 -r $(VENV)/bin/clang-format -i

docs: $(VENV)/drot-installed
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict --quiet

# Without isolation: the wheel fits the torch of the environment. DROT_WHEEL_LABEL=torch2.13.cpu makes the wheel
# drot-0.1.0+torch2.13.cpu, so that wheels for several torches can lie side by side.
dist: $(VENV)/drot-installed
	rm -rf dist
	$(VENV)/bin/python -m build --no-isolation .

clean:
	rm -rf build dist site demo-output demo-output.partial demo-output.*.part drot.egg-info drot/_C*.so $(VENV)

# torch first: drot is compiled against the torch that it will run with, hence without build isolation.
# The stamp names the torch that was installed to the end. The file `unfinished` exists while pip installs
# torch. After a cut-off the environment is made from nothing, since half a package may pass for a whole one.
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

# drot/_C*.so fits one torch only, and all environments of this checkout share the file. build/in-place says
# for whom the file was built. Where that is another environment, torch or backend, make builds it again;
# CMake keeps a folder for each torch, so that this compiles only what changed.
WANTED := $(strip $(VENV) $(TORCH) $(DROT_WITH_CUDA))
ifneq ($(if $(wildcard drot/_C*.so),$(shell cat build/in-place 2> /dev/null)),$(WANTED))
.PHONY: $(VENV)/drot-installed
endif
$(VENV)/drot-installed: $(VENV)/torch-installed $(SOURCES)
	@mkdir -p build && rm -f build/in-place
	$(VENV)/bin/pip install --quiet --no-build-isolation --editable '.[dev]'
	@echo '$(WANTED)' > build/in-place
	touch $@
