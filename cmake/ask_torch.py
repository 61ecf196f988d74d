"""Prints paths and versions of the installed torch, one NAME=value per line, for cmake/Torch.cmake."""

import contextlib
import io
from pathlib import Path

# CMake reads stdout, on which torch's import may print warnings
with contextlib.redirect_stdout(io.StringIO()):
    import torch

root = Path(torch.__file__).parent
print(f"TORCH_ROOT={root}")
print(f"TORCH_SITE_PACKAGES={root.parent}")
print(f"TORCH_VERSION={torch.__version__}")
print(f"TORCH_CUDA_VERSION={torch.version.cuda or ''}")
print(f"TORCH_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
