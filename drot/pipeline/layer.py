"""The pruning of one decoder layer, with its figures for the manifest and the maps of its importance."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from drot.calibration.dense_reference import DenseReference
from drot.calibration.hessian import InputHessian
from drot.calibration.layer_pass import LayerPass
from drot.checkpoint.dtypes import rounded
from drot.config import PruningConfig, ResolvedRecipe
from drot.core.errors import UserError
from drot.machine.ranks import Ranks
from drot.model.linear import Linear
from drot.model.rotation import LayerRotation
from drot.pipeline.importance import GroupImportance
from drot.pipeline.shard import round_weights
from drot.pruning import PruneOutcome, dense_target, prune_once, solve_weights

logger = logging.getLogger("drot")


@torch.no_grad()
def prune_layer(
    layer_pass: LayerPass,
    recipe: ResolvedRecipe,
    *,
    dense: DenseReference | None = None,
    rotation: LayerRotation | None = None,
    output_r1: Tensor | None = None,
    save_dtype: torch.dtype | None = None,
) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    """Prunes the linears of a layer in place, and rounds all its parameters to `save_dtype`.

    The Hessian of an input group is computed after the groups before it are pruned, and factorised once for
    all its linears. A linear with a sparsity of 0 is not changed, and has only the first three figures.

    Returns name of a linear → its entry of the manifest (manifest/records.py), and `<name>.<map>` → the
    tensors of GroupImportance. Output errors compare with the outputs of the target weight, which differs
    from the weight of the layer for `target="dense"`; the error `before` the rotation always compares with
    the outputs of the weight. An expert has its own outputs as target. A warning names the expert with the
    fewest tokens, if they are fewer than its channels.

    layer_pass: a new pass through the layer. Afterwards it can `advance` through the pruned layer.
    dense: the layer before it is pruned, with its inputs in the dense model, for `target="dense"`.
    rotation: the rotation that was merged into the layer.
    output_r1: R1 [d, d] of the basis in which the layer writes; None if no rotation acts on what it writes.
    save_dtype: dtype of the saved weights; None rounds nothing. Errors are those before the rounding.
    """
    layer, pruning, ranks = layer_pass.layer, recipe.pruning, layer_pass.stream.ranks
    figures: dict[str, dict[str, Any]] = {
        name: {"sparsity": 0.0, "output_error": 0.0, "damping": None} for name in layer.linears
    }
    maps: dict[str, Tensor] = {}
    seen: dict[str, int] = {}
    save_dtype = save_dtype or layer.dtype
    pruned = {name for name, linear in layer.linears.items() if pruning.sparsity_for(linear.full_name).ratio}
    round_weights(layer, save_dtype, leave=pruned)
    for group in layer.groups:
        linears = [linear for linear in layer.linears_of(group) if linear.name in pruned]
        if not linears:
            continue
        targets = [_own_rows(linear.weight, ranks) for linear in linears]
        hessian = importance = tokens = None
        if len(layer_pass.stream.hidden_states):
            statistics = matrix = None
            if dense is None or group.expert is not None:  # the dense model sends other tokens to the expert
                matrix = layer_pass.hessian(group)
                tokens = layer_pass.tokens[group.name]
                if group.expert is not None and tokens < len(matrix):
                    seen[group.name] = tokens
                if tokens == 0:  # nothing is known of the inputs: as if they were independent
                    matrix.fill_diagonal_(1.0)
            else:
                statistics = dense.statistics(layer_pass, group)
                if statistics.output_change is not None:
                    own = _own_rows(statistics.output_change, ranks)
                    statistics = dataclasses.replace(statistics, output_change=own)
                matrix = statistics.hessian
            hessian = InputHessian(matrix, pruning.damping, pruning.damping_average, ranks.of_machine)
            writes_in = output_r1 if layer.ends_layer(group) else None
            importance = GroupImportance(group, hessian, recipe, layer.heads, rotation, writes_in)
            if statistics is not None:
                with _named(layer.index, linears):
                    share = pruning.target_weight
                    targets = [dense_target(w, statistics, hessian.factor, share=share) for w in targets]
            del statistics, matrix
        found = _prune_group(layer_pass, linears, targets, recipe, hessian, importance, maps, save_dtype)
        figures |= {
            name: of_linear | ({} if group.expert is None else {"tokens": tokens})
            for name, of_linear in found.items()
        }
    if seen:
        fewest = min(seen, key=lambda name: seen[name])
        logger.warning(
            "layer %d: %d inputs of experts have fewer calibration tokens than channels, the fewest %s with "
            "%d: use more `nsamples`, or `route_all`",
            layer.index, len(seen), fewest, seen[fewest],
        )  # fmt: skip
    return figures, maps


def _own_rows(matrix: Tensor, ranks: Ranks) -> Tensor:
    """The rows of a matrix [out, in] that this rank computes."""
    return matrix[ranks.share(len(matrix))]


def _prune_group(
    layer_pass: LayerPass,
    linears: list[Linear],
    targets: list[Tensor],
    recipe: ResolvedRecipe,
    hessian: InputHessian | None,
    importance: GroupImportance | None,
    maps: dict[str, Tensor],
    save_dtype: torch.dtype,
) -> dict[str, dict[str, Any]]:
    """Prunes linears of one input in place; returns their entries of the manifest, and adds to `maps`.

    The rows of a weight are independent, given the factor of its Hessian: each rank computes its own, and
    all ranks gather the results.

    targets: this rank's rows of the weights whose outputs the linears should have.
    """
    index, ranks = layer_pass.layer.index, layer_pass.stream.ranks
    configs = [recipe.pruning.for_linear(linear.full_name) for linear in linears]
    outcomes: list[PruneOutcome] = []
    for linear, target, config in zip(linears, targets, configs, strict=True):
        with _named(index, [linear]):
            outcomes.append(prune_once(target, hessian, config, ranks=ranks))
    one_shot: list[dict[str, dict[str, float | None]]] = [{} for _ in linears]
    if hessian is not None and importance is not None:
        with _named(index, linears):
            _ = importance.scale_after
            if importance.hessian is not hessian and recipe.pruning.solve != "sparsegpt":
                hessian.forget_factor()  # before the factor of the other Hessian
        for i, (linear, target, config) in enumerate(zip(linears, targets, configs, strict=True)):
            with _named(index, [linear]):
                own = target.data_ptr() == _own_rows(linear.weight, ranks).data_ptr()
                known = outcomes[i].energy if own else None  # a rotation does not change it
                error = outcomes[i].output_error
                one_shot[i] = _one_shot(linear, config, error, known, importance, maps, ranks)
        importance.forget()
        if recipe.pruning.solve in ("pcg", "admm"):
            hessian.forget_factor()  # they take H alone, and memory of their own
        with _named(index, linears):
            outcomes = solve_weights(outcomes, targets, hessian, configs, recipe.pruning.solve, ranks)
    figures = {}
    for linear, outcome, of_linear in zip(linears, outcomes, one_shot, strict=True):
        rows = rounded(f"{linear.full_name}.weight", outcome.weight, save_dtype)
        _own_rows(linear.weight, ranks).copy_(rows)
        ranks.gather_rows_(linear.weight)
        figures[linear.name] = {
            "sparsity": float((linear.weight == 0).float().mean()),
            "output_error": outcome.output_error,
            "damping": outcome.damping,
            "one_shot": of_linear,
            "admm_iterations": outcome.admm_iterations,
        }
    return figures


def _one_shot(
    linear: Linear,
    config: PruningConfig,
    error: float | None,
    energy: float | None,
    importance: GroupImportance,
    maps: dict[str, Tensor],
    ranks: Ranks,
) -> dict[str, dict[str, float | None]]:
    """Basis → the figures of the pruning without solver; adds the maps of the dense linear to `maps`.

    error: of the outputs in the last basis. energy: tr(W H Wᵀ) of the linear, where it is known.
    """
    unrotated = importance.unrotated(linear.spec, linear.weight)
    shares, found = importance.of_weight(linear.weight, unrotated, config.sparsity)
    errors = {list(shares)[-1]: error}
    if importance.rotated:
        own = _own_rows(unrotated, ranks)
        outcome = prune_once(own, importance.hessian, config, total=energy, ranks=ranks)
        errors["before"] = outcome.output_error
    maps |= {f"{linear.name}.{name}": values for name, values in found.items()}
    return {
        basis: {"removed_importance": lost, "output_error": errors[basis]} for basis, lost in shares.items()
    }


@contextlib.contextmanager
def _named(index: int, linears: list[Linear]) -> Iterator[None]:
    """Adds the layer and the linears to a UserError."""
    try:
        yield
    except UserError as error:
        names = ", ".join(linear.name for linear in linears)
        raise UserError(f"layer {index}, {names}: {error}") from None
