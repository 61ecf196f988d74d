"""The version, written here and nowhere else: pyproject.toml and CMake read this file."""

__version__ = "0.1.0"
