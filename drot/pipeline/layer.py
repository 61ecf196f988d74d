"""The pruning of one decoder layer, with its figures for the manifest and the maps of its importance."""

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from drot.calibration.hessian import InputHessian, Scalar, at_once, diagonal_of
from drot.calibration.layer_pass import LayerPass, target_statistics
from drot.checkpoint.dtypes import rounded
from drot.config import PruningConfig, ResolvedRecipe
from drot.core.errors import UserError
from drot.machine.ranks import Ranks
from drot.model.family import InputGroup, alike
from drot.model.layer import DecoderLayer
from drot.model.linear import Linear
from drot.model.rotation import LayerRotation
from drot.pipeline.importance import GroupImportance
from drot.pipeline.saved_layer import round_layer
from drot.pruning import PruneOutcome, dense_target, prune_once, solve_weights

logger = logging.getLogger("drot")


@torch.no_grad()
def prune_layer(
    layer_pass: LayerPass,
    recipe: ResolvedRecipe,
    *,
    dense: LayerPass | None = None,
    rotation: LayerRotation | None = None,
    output_r1: Tensor | None = None,
    save_dtype: torch.dtype | None = None,
) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    """Prunes the linears of a layer in place, and rounds all its parameters to `save_dtype`.

    The Hessian of an input group is computed after the groups before it are pruned, and factorised once for
    all its linears. A linear with a sparsity of 0 is not changed, and has only the first three figures.

    Returns name of a linear → its entry of the manifest (checkpoint/records.py), and `<name>.<map>` → the
    tensors of GroupImportance. Output errors compare with the outputs of the target weight, which differs
    from the weight of the layer for `target="dense"`; the error `before` the rotation always compares with
    the outputs of the weight. An expert has its own outputs as target. A warning names the expert with the
    fewest tokens, if they are fewer than its channels.

    layer_pass: a new pass through the layer. Afterwards it can `advance` through the pruned layer.
    dense: a pass of the dense model through the layer before it is pruned, for `target="dense"`.
    rotation: the rotation that was merged into the layer.
    output_r1: R1 [d, d] of the basis in which the layer writes; None if no rotation acts on what it writes.
    save_dtype: dtype of the saved weights; None rounds nothing. Errors are those before the rounding.
    """
    layer, pruning, ranks = layer_pass.layer, recipe.pruning, layer_pass.stream.ranks
    figures: dict[str, dict[str, Any]] = {
        name: {"sparsity": 0.0, "output_error": 0.0, "damping": None} for name in layer.linears
    }
    maps: dict[str, Tensor] = {}
    save_dtype = save_dtype or layer.dtype
    pruned = {name for name, linear in layer.linears.items() if pruning.sparsity_for(linear.full_name).ratio}
    round_layer(layer, save_dtype, leave=pruned)
    for groups in batches(layer, pruned, pruning):
        of_groups = zip(*map(layer.linears_of, groups), strict=True)
        roles = [Role(list(linears)) for linears in of_groups if linears[0].name in pruned]
        weights = [_own_rows(role.weight, ranks) for role in roles]
        targets, group, hessian, importance, tokens = weights, groups[0], None, None, []
        if len(layer_pass.stream.hidden_states):
            statistics = None
            if dense is None or group.expert is not None:  # the dense model sends other tokens to the expert
                matrix = layer_pass.hessian(*groups)
                if group.expert is not None:
                    tokens = [layer_pass.tokens[each.name] for each in groups]
                    fill_missing(matrix)
            else:
                statistics = target_statistics(layer_pass, dense, group)
                if statistics.output_change is not None:
                    own = _own_rows(statistics.output_change, ranks)
                    statistics = dataclasses.replace(statistics, output_change=own)
                matrix = statistics.hessian
            hessian = InputHessian(matrix, pruning.damping, pruning.damping_average, ranks)
            writes_in = output_r1 if layer.ends_layer(group) else None
            importance = GroupImportance(group, hessian, recipe, layer.heads, rotation, writes_in)
            if statistics is not None:
                with located(layer.index, roles):
                    share = pruning.target_weight
                    targets = [dense_target(w, statistics, hessian.factor, share=share) for w in targets]
            del statistics, matrix
        found = _prune_group(
            layer_pass, roles, weights, targets, recipe, hessian, importance, maps, save_dtype
        )
        for of_role in found:
            for linear, of_linear, count in itertools.zip_longest(*of_role, tokens):
                figures[linear.name] = of_linear | ({} if count is None else {"tokens": count})
    _warn_of_few_tokens(layer_pass)
    return figures, maps


def fill_missing(matrix: Tensor) -> None:
    """Sets the diagonal of an expert's H [..., in, in] to 1, in place, where H is 0 because no token counts.

    The expert is then pruned as if its inputs were independent.
    """
    diagonal = diagonal_of(matrix)
    diagonal.masked_fill_((diagonal == 0).all(-1, keepdim=True), 1.0)


def batches(layer: DecoderLayer, pruned: Collection[str], pruning: PruningConfig) -> list[list[InputGroup]]:
    """The groups with a linear in `pruned`, in the order in which they are pruned.

    Groups of experts that follow each other and are pruned alike are together, while their Hessians take at
    most BATCH_BYTES (`at_once`).
    """

    def treated(group: InputGroup) -> list[PruningConfig | None]:
        linears = layer.linears_of(group)
        return [pruning.for_linear(one.full_name) if one.name in pruned else None for one in linears]

    found = []
    for same in alike(layer.groups):
        count = at_once(layer.shape_of(same[0].linears[0])[1])
        for treatment, run in itertools.groupby(same, treated):
            groups = list(run)
            if any(treatment):
                found += [groups[start : start + count] for start in range(0, len(groups), count)]
    return found


def _warn_of_few_tokens(layer_pass: LayerPass) -> None:
    layer = layer_pass.layer
    widths = {group.name: layer.shape_of(group.linears[0])[1] for group in layer.groups}
    few = {name: tokens for name, tokens in layer_pass.tokens.items() if tokens < widths[name]}
    if few:
        fewest = min(few, key=lambda name: few[name])
        logger.warning(
            "layer %d: %d inputs of experts have fewer calibration tokens than channels, the fewest %s with "
            "%d: use more `nsamples`, or `route_all`",
            layer.index, len(few), fewest, few[fewest],
        )  # fmt: skip


def _own_rows(matrix: Tensor, ranks: Ranks) -> Tensor:
    """The rows of a matrix [..., out, in] that this rank computes."""
    return matrix[..., ranks.share(matrix.shape[-2]), :]


class Role:
    """One linear of a layer, or of several experts that follow each other."""

    def __init__(self, linears: list[Linear]) -> None:
        self.linears, self.first = linears, linears[0]

    @property
    def weight(self) -> Tensor:
        """[out, in], or [experts, out, in]; a view."""
        start = self.first.spec.expert
        if start is None:
            return self.first.weight
        return self.first.weights_of(slice(start, start + len(self.linears)))

    @property
    def name(self) -> str:
        last = self.linears[-1].name
        return last if len(self.linears) == 1 else f"{self.first.name} to {last}"

    def each(self, figure: Any) -> list[Any]:
        """A figure, or tensor, of each of the linears: an element of a batch."""
        if self.first.spec.expert is None:
            return [figure.item() if isinstance(figure, Tensor) and not figure.dim() else figure]
        if isinstance(figure, Tensor):
            return figure.tolist() if figure.dim() == 1 else list(figure.unbind())
        return [figure] * len(self.linears)


def _prune_group(
    layer_pass: LayerPass,
    roles: list[Role],
    weights: list[Tensor],
    targets: list[Tensor],
    recipe: ResolvedRecipe,
    hessian: InputHessian | None,
    importance: GroupImportance | None,
    maps: dict[str, Tensor],
    save_dtype: torch.dtype,
) -> list[tuple[list[Linear], list[dict[str, Any]]]]:
    """Prunes linears of one input in place, or those of a batch of experts. Adds to `maps`.

    The rows of a weight are independent, given the factor of its Hessian: each rank computes its own, and
    all ranks gather the results.

    Returns for each role its linears and their entries of the manifest.

    weights, targets: this rank's rows of the weights, and of those whose outputs the linears should have.
    """
    index, ranks = layer_pass.layer.index, layer_pass.stream.ranks
    configs = [recipe.pruning.for_linear(role.first.full_name) for role in roles]
    outcomes: list[PruneOutcome] = []
    for role, target, config in zip(roles, targets, configs, strict=True):
        with located(index, [role]):
            outcomes.append(prune_once(target, hessian, config, ranks=ranks))
    one_shot: list[dict[str, dict[str, Any]]] = [{} for _ in roles]
    if hessian is not None and importance is not None:
        with located(index, roles):
            _ = importance.scale_after
            if importance.hessian is not hessian and recipe.pruning.solve != "sparsegpt":
                hessian.forget_factor()  # before the factor of the other Hessian
        for i, (role, config, outcome) in enumerate(zip(roles, configs, outcomes, strict=True)):
            with located(index, [role]):
                known = outcome.energy if targets is weights else None  # a rotation does not change it
                one_shot[i] = _one_shot(role, config, outcome.output_error, known, importance, maps, ranks)
        importance.forget()
        if recipe.pruning.solve in ("pcg", "admm"):
            hessian.forget_factor()  # they take H alone, and memory of their own
        with located(index, roles):
            outcomes = solve_weights(outcomes, targets, hessian, configs, recipe.pruning.solve, ranks)
    figures = []
    for role, outcome, of_role in zip(roles, outcomes, one_shot, strict=True):
        rows = rounded(f"{role.first.full_name}.weight", outcome.weight, save_dtype)
        _own_rows(role.weight, ranks).copy_(rows)
        ranks.gather_rows_(role.weight.transpose(0, -2))  # rows first, also of a batch
        found = {
            "sparsity": (role.weight == 0).float().mean((-2, -1)),
            "output_error": outcome.output_error,
            "damping": outcome.damping,
            "admm_iterations": outcome.admm_iterations,
        }
        figures.append((role.linears, _of_each(role, found | {"one_shot": of_role})))
    return figures


def _of_each(role: Role, figures: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures of each linear of a role, from those of the role; figures may hold figures."""
    columns = {
        name: _of_each(role, figure) if isinstance(figure, dict) else role.each(figure)
        for name, figure in figures.items()
    }
    return [{name: column[i] for name, column in columns.items()} for i in range(len(role.linears))]


def _one_shot(
    role: Role,
    config: PruningConfig,
    error: Scalar | None,
    energy: Scalar | None,
    importance: GroupImportance,
    maps: dict[str, Tensor],
    ranks: Ranks,
) -> dict[str, dict[str, Scalar | None]]:
    """Basis → the figures of the pruning without solver; adds the maps of the dense linears to `maps`.

    error: of the outputs in the last basis. energy: tr(W H Wᵀ), where it is known.
    """
    weight = role.weight
    unrotated = importance.unrotated(role.first.spec, weight)
    shares, found = importance.of_weight(weight, unrotated, config.sparsity)
    errors = {list(shares)[-1]: error}
    if importance.rotated:
        own = _own_rows(unrotated, ranks)
        outcome = prune_once(own, importance.hessian, config, total=energy, ranks=ranks)
        errors["before"] = outcome.output_error
    for name, values in found.items():
        maps |= {f"{one.name}.{name}": own for one, own in zip(role.linears, role.each(values), strict=True)}
    return {
        basis: {"removed_importance": lost, "output_error": errors[basis]} for basis, lost in shares.items()
    }


@contextlib.contextmanager
def located(index: int, roles: list[Role]) -> Iterator[None]:
    """A context that adds the layer and the linears to a UserError."""
    try:
        yield
    except UserError as error:
        names = ", ".join(role.name for role in roles)
        raise UserError(f"layer {index}, {names}: {error}") from None
