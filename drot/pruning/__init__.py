"""Pruning of one weight, as functions on tensors."""

from drot.pruning.magnitude import prune_magnitude
from drot.pruning.masks import removed_mask
from drot.pruning.result import PruneOutcome, output_error
from drot.pruning.solve import solve_kept_weights
from drot.pruning.sparsegpt import prune_sparsegpt
from drot.pruning.target import dense_target
from drot.pruning.wanda import prune_wanda
from drot.pruning.weight import prune_once, prune_weight, solve_weights

__all__ = [
    "PruneOutcome",
    "dense_target",
    "output_error",
    "prune_magnitude",
    "prune_once",
    "prune_sparsegpt",
    "prune_wanda",
    "prune_weight",
    "removed_mask",
    "solve_kept_weights",
    "solve_weights",
]
