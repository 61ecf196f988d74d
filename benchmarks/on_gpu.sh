#!/usr/bin/env bash
# Builds, tests and measures drot on a machine with a GPU; benchmarks/gpu/run.py has the options (--help).
# PYTHON (default python3) must have a CUDA torch and what drot needs; nothing is installed.
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/gpu/run.py" "$@"
