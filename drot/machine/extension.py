"""Loads the native extension `drot._C`. If that fails, the ImportError contains the build command."""

import torch

from drot.core.version import __version__

BUILD_COMMAND = "pip install --no-build-isolation ."
BUILD_IN_PLACE = "python setup.py build_ext --inplace"


def _load() -> dict[str, str]:
    advice = f"build it in the drot checkout with `{BUILD_COMMAND}` (in place: `{BUILD_IN_PLACE}`)"
    try:
        from drot import _C
    except ImportError as error:
        missing = "cannot import name '_C'" in str(error)
        reason = "is not built" if missing else f"does not load with torch {torch.__version__} ({error})"
        raise ImportError(f"drot's native extension {reason}: {advice}") from None
    info = _C.build_info()
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
    return info


#: how the extension was built: version, torch, compiler, cuda, cuda_architectures, no_cuda_reason,
#: cusparselt. A value is "" if it does not apply.
BUILD_INFO = _load()
