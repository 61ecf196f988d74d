"""The native ops. Each module holds one op and its reference in plain PyTorch (`*_ref`).

`registration` holds the fake kernels and autograd formulas of all ops.
"""

from drot.ops import registration
from drot.ops.batched_qr import batched_qr, batched_qr_backward, batched_qr_ref, cholesky_qr
from drot.ops.column_scale import (
    column_scale,
    column_scale_backward,
    column_scale_backward_ref,
    column_scale_ref,
)
from drot.ops.entropy_loss import entropy_loss, entropy_loss_and_grad, entropy_loss_ref
from drot.ops.nm_mask import nm_mask, nm_mask_ref
from drot.ops.pack24 import pack24, pack24_ref, unpack24, unpack24_ref
from drot.ops.polar_start import polar_start, polar_start_ref
from drot.ops.pruned_importance import (
    pruned_importance,
    pruned_importance_and_grad,
    pruned_importance_ref,
)
from drot.ops.rope import rope, rope_ref
from drot.ops.skew_momentum import skew_momentum, skew_momentum_ref
from drot.ops.sparse24_experts import sparse24_experts, sparse24_experts_ref
from drot.ops.sparse24_linear import sparse24_compress, sparse24_linear, sparse24_linear_ref
from drot.ops.sparsegpt_sweep import sparsegpt_sweep, sparsegpt_sweep_ref
from drot.ops.spectral_step import spectral_step, spectral_step_ref
from drot.ops.swiglu_rotate import swiglu_rotate, swiglu_rotate_ref
from drot.ops.turn_start import turn_start, turn_start_ref
