"""The version, written here and nowhere else: pyproject.toml and CMake read this file."""

__version__ = "0.1.0"
#: builds drot in its checkout, for the torch of the environment
BUILD_COMMAND = "pip install --no-build-isolation ."
