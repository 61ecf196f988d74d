"""The native ops, and beside each its reference in plain PyTorch (`*_ref`)."""

from drot.ops.nm_mask import nm_mask, nm_mask_ref
from drot.ops.sparsegpt_sweep import sparsegpt_sweep, sparsegpt_sweep_ref

__all__ = ["nm_mask", "nm_mask_ref", "sparsegpt_sweep", "sparsegpt_sweep_ref"]
