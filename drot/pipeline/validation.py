"""Checks that a recipe, a model and calibration tokens fit each other, before the run starts."""

import math
from typing import Any

from torch import Tensor

from drot.checkpoint.quantization_config import QUANT_METHOD, quantization_config_of, refuse_quantised
from drot.config import PruningConfig, ResolvedRecipe, ResolvedRotation, matches
from drot.core.errors import UserError
from drot.machine.ranks import ALONE, Ranks
from drot.model.families import down_widths, family_of, linears_of
from drot.model.sizes import check_down_block, check_seqlen, experts_of, vocabulary_of
from drot.sparse.packed import dense_linears


def check_prunable(config: Any) -> None:
    """Raises UserError for a model of another architecture, and for one that is quantised already."""
    family_of(config)
    if quantised := quantization_config_of(config):
        method = quantised.get("quant_method")
        if method == QUANT_METHOD and quantised.get("packed"):
            raise UserError("this model is packed, so it was pruned already: prune its dense original")
        if method == QUANT_METHOD:
            raise UserError("this model was already rotated by drot: prune its dense original")
        refuse_quantised(config)


def check_recipe(
    config: Any, recipe: ResolvedRecipe, *, rotations_given: bool = False, ranks: Ranks = ALONE
) -> None:
    """Checks a recipe against a model's `config`, which is available before the weights are loaded.

    Raises UserError for

    - more ranks than sequences, or than rows of a linear,
    - rotations of the residual if all layers have the same R1, or if the R1 of the next layer is not known
      when a layer is pruned, and a boundary that the family cannot have,
    - patterns of `keep` and `sparsity_of` that match no linear,
    - `route_all` in a model without experts,
    - n:m, blocks or blocks of R3 that do not divide the model's dimensions, and R3 in a family without it,
    - the packed format if no linear is 2:4.
    """
    rotation, hidden, blocks = recipe.rotation, config.hidden_size, recipe.rotation.blocks
    _check_ranks(config, recipe, ranks)
    _check_boundary(config, rotation, rotations_given)
    _check_patterns(config, recipe.pruning)
    if recipe.format == "packed":
        dense_linears(config, recipe.pruning)
    if rotation.down_block is not None:
        if not family_of(config).takes("r3"):
            raise UserError(
                f"a model of type {config.model_type!r} takes no R3, got blocks of {rotation.down_block}: "
                "use `down_rotation` none, or the rotation stock in place of light"
            )
        check_down_block(rotation.down_block, *down_widths(config))
    if recipe.pruning.route_all and not experts_of(config):
        raise UserError(f"`route_all` has no effect on a model of type {config.model_type!r}: leave it out")
    if hidden % blocks:
        raise UserError(f"`blocks` must divide the hidden size {hidden}; got {blocks}")


def _check_ranks(config: Any, recipe: ResolvedRecipe, ranks: Ranks) -> None:
    """Raises UserError if a rank would have no sequence, or no row of a linear."""
    rows = min(outputs for _, _, (outputs, _) in linears_of(config))
    if ranks.size > rows:
        raise UserError(f"at most {rows} ranks can share a linear of {rows} rows, got {ranks.size}")
    if recipe.reads_calibration:
        check_each_has_a_sequence(ranks, recipe.calibration.nsamples, "use more `nsamples`")


def check_each_has_a_sequence(ranks: Ranks, sequences: int, remedy: str) -> None:
    """Raises UserError if a rank would have no sequence of the calibration."""
    if ranks.size > sequences:
        raise UserError(
            f"{ranks.size} ranks need at least {ranks.size} calibration sequences, got {sequences}: {remedy}"
        )


def down_width(config: Any, pruning: PruningConfig) -> int:
    """The number of inputs that R3 rotates in each down_proj of a model of `config`.

    The largest number that divides all of them in a mixture, whose experts and other MLPs have different
    numbers; 0 if no such linear is pruned.
    """
    names = (name for name, spec, _ in linears_of(config) if spec.input == "r3")
    return 0 if all(map(pruning.keeps, names)) else math.gcd(*down_widths(config))


def _check_patterns(config: Any, pruning: PruningConfig) -> None:
    """Raises UserError for a pattern that matches no linear, and for n:m that does not divide its inputs."""
    linears = {name: (linear, inputs) for name, linear, (_, inputs) in linears_of(config)}
    patterns = [("keep", pattern) for pattern in pruning.keep]
    for field, pattern in patterns + [("sparsity_of", pattern) for pattern, _ in pruning.sparsity_of]:
        if not any(matches(pattern, name) for name in linears):
            first = next(iter(linears))
            raise UserError(
                f"the pattern {pattern!r} of `{field}` matches no linear of this model, which has "
                f"{config.num_hidden_layers} layers: {first} is the name of a linear, which layers.0.* and "
                f"{linears[first][0].name} match"
            )
    for name, (_, size) in linears.items():
        sparsity = pruning.sparsity_for(name)
        if sparsity.structured and size % sparsity.m:
            raise UserError(
                f"{sparsity} of {name} needs dimensions that are multiples of {sparsity.m}; got {size} "
                "inputs: choose another n:m or a ratio as `sparsity` or `sparsity_of`"
            )


def _check_boundary(config: Any, rotation: ResolvedRotation, rotations_given: bool) -> None:
    place, inside = rotation.boundary, not family_of(config).rotates_stream
    if place != "input" and rotation.mode != "layer":
        why = "all layers have the same R1" if rotation.mode == "shared" else "nothing is rotated"
        raise UserError(
            f'`boundary` must be auto or input with `mode="{rotation.mode}"`, where {why}; got "{place}"'
        )
    sharing, layers = rotation.layers_per_rotation, config.num_hidden_layers
    if sharing > 1 and rotation.mode != "layer":
        raise UserError(
            f'`layers_per_rotation` must be 1 with `mode="{rotation.mode}"`, got {sharing}: leave it out, or '
            'use `mode="layer"`'
        )
    if sharing > 1 and inside:
        raise UserError(
            f"`layers_per_rotation` must be 1 for a model of type {config.model_type!r}, whose layers "
            f"multiply by their own R1 in any case; got {sharing}: leave it out"
        )
    if sharing >= layers > 1:
        raise UserError(
            f"`layers_per_rotation` must be below the number of layers, {layers}; got {sharing}: use "
            '`mode="shared"` for one R1 of all layers'
        )
    if rotation.mode == "layer" and (place == "inside") != inside:
        why = "whose residual stream " + ("cannot rotate" if inside else "rotates")
        raise UserError(
            f"`boundary` must be auto or {'inside' if inside else 'input or residual'} for a model of type "
            f'{config.model_type!r}, {why}; got "{place}": leave it out'
        )
    if (sharing > 1 or place == "residual") and rotation.hessians != "dense" and not rotations_given:
        option = "`layers_per_rotation` above 1" if sharing > 1 else '`boundary="residual"`'
        raise UserError(
            f"{option} needs the rotations of later layers before a layer is pruned; got "
            f'`hessians="{rotation.hessians}"`: use `hessians="dense"`, or name a file of `rotations`'
        )


def check_tokens(tokens: Tensor, config: Any) -> None:
    """Raises UserError for token ids outside of the model's vocabulary and for too long sequences."""
    if not len(tokens):
        return  # a run that needs no calibration
    if int(tokens.max()) >= (vocabulary := vocabulary_of(config)) or int(tokens.min()) < 0:
        raise UserError(
            f"calibration token ids must be in [0, {vocabulary}), the model's vocabulary, "
            f"got {int(tokens.min())} to {int(tokens.max())}: use the model's tokenizer"
        )
    check_seqlen(tokens.shape[1], config)
