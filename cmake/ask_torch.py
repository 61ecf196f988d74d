"""Prints what cmake/Torch.cmake must know of the active torch, one NAME=value a line."""

import contextlib
import io
from pathlib import Path

# torch may warn on stderr (no NumPy, for one); stdout belongs to CMake
with contextlib.redirect_stdout(io.StringIO()):
    import torch

root = Path(torch.__file__).parent
print(f"TORCH_ROOT={root}")
print(f"TORCH_SITE_PACKAGES={root.parent}")
print(f"TORCH_VERSION={torch.__version__}")
print(f"TORCH_CUDA_VERSION={torch.version.cuda or ''}")
print(f"TORCH_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
