"""Pruning of one weight, as functions on tensors."""

from drot.pruning.magnitude import prune_magnitude
from drot.pruning.masks import removed_mask
from drot.pruning.result import PruneOutcome, output_error
from drot.pruning.solve import solve_kept_weights
from drot.pruning.sparsegpt import prune_sparsegpt
from drot.pruning.wanda import prune_wanda
from drot.pruning.weight import dense_target, prune_once, solve_weights
