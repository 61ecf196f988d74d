"""Loads the native module, and says how to build it where it is missing."""

import torch

from drot.version import __version__

BUILD_COMMAND = "pip install --no-build-isolation ."
BUILD_IN_PLACE = "python setup.py build_ext --inplace"


def _load() -> dict[str, str]:
    how = f"build it in the drot checkout with `{BUILD_COMMAND}` (in place: `{BUILD_IN_PLACE}`)"
    try:
        from drot import _C
    except ImportError as error:
        missing = "cannot import name '_C'" in str(error)
        reason = "is not built" if missing else f"does not load with torch {torch.__version__} ({error})"
        raise ImportError(f"drot's native extension {reason}: {how}") from None
    info = _C.build_info()
    if info["version"] != __version__:
        raise ImportError(
            f"drot's native extension is of version {info['version']}, drot is {__version__}: {how}"
        )
    return info


#: what the binary was made of: version, torch, compiler, cuda, cuda_architectures, no_cuda_reason,
#: cusparselt; "" where there is none
BUILD_INFO = _load()
