"""Loads the native extension `drot._C`. If that fails, the ImportError contains the build command."""

import torch

from drot.core.version import BUILD_COMMAND, __version__

BUILD_IN_PLACE = "python setup.py build_ext --inplace"


def _check() -> None:
    advice = f"build it in the drot checkout with `{BUILD_COMMAND}` (in place: `{BUILD_IN_PLACE}`)"
    try:
        from drot._C import build_info
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError)
        reason = "is not built" if missing else f"does not load with torch {torch.__version__} ({error})"
        raise ImportError(f"drot's native extension {reason}: {advice}") from None
    info = build_info()
    if info["version"] != __version__:
        raise ImportError(
            f"drot's native extension has version {info['version']}, but drot has version {__version__}: "
            f"{advice}"
        )
    if info["torch"] != torch.__version__:
        raise ImportError(
            f"drot's native extension was built for torch {info['torch']}, but torch {torch.__version__} is "
            f"installed: {advice}"
        )


_check()
