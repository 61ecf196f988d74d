"""The settings with which a run fits into the memory of a device."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drot.checkpoint.size import size_text
from drot.config import Recipe, ResolvedRecipe
from drot.core.errors import UserError
from drot.machine.devices import is_gpu, pick_device
from drot.pipeline.dry_run import RunNeeds, run_needs

#: share of the memory that a run may take by its estimate: CUDA itself takes some, and the estimate is rough
USED_SHARE = 0.9
#: `layers_per_step` of a shared rotation whose layers do not lie on the device together
LAYERS_PER_STEP = 4


@dataclass(frozen=True)
class Fitted:
    """The settings that were chosen.

    recipe: the recipe with them. changes: field → value, of the fields that had to change.
    asked, needed: bytes on the device by the estimate, with the recipe that was asked for and with this one.
    """

    recipe: Recipe
    changes: dict[str, Any]
    asked: int
    needed: int


def fitted(
    model: str | Path,
    recipe: Recipe,
    memory: int,
    *,
    fixed: Collection[str] = (),
    device: str = "auto",
    **options: Any,
) -> Fitted:
    """The recipe with as few changes as its run needs to fit into `memory` bytes of the device.

    What costs the most quality changes last: first a shared rotation trains a few layers in a step, then the
    layers are not trained together, then not alone, then no solver computes their weights. On a CPU the
    device's memory is the main memory, which all ranks share.

    fixed: fields that stay as they are.
    options: further arguments of `run_needs`.

    Raises UserError if no such recipe fits, and as `drot.prune` does.
    """
    on_cpu = not is_gpu(pick_device(device))

    def needs_of(changes: dict[str, Any]) -> tuple[RunNeeds, int]:
        needs = run_needs(model, recipe.replace(**changes), device=device, **options)
        of_device = max(needs.device_memory, needs.distillation)
        return needs, needs.gpus * of_device + needs.main_memory if on_cpu else of_device

    needs, asked = needs_of({})
    tried = {}
    for changes in _lower(needs.recipe, fixed):
        needed = needs_of(changes)[1] if changes else asked
        if needed <= USED_SHARE * memory:
            return Fitted(recipe.replace(**changes), changes, asked, needed)
        tried[needed] = changes
    least = min(tried)
    lowered = "".join(f', `{field}="{value}"`' for field, value in tried[least].items())
    raise UserError(
        f"`fit` is {size_text(memory)}, of which a run may take {USED_SHARE:.0%}, but this run needs about "
        f"{size_text(least)}{lowered and f' even with{lowered[1:]}'}: name more memory or a smaller model"
    )


def _lower(recipe: ResolvedRecipe, fixed: Collection[str]) -> Iterator[dict[str, Any]]:
    """The changes of `recipe` that need less memory, from none to all; no field of `fixed` changes."""
    qualities: list[dict[str, Any]] = [{}]
    if recipe.recovery.distill_epochs:
        qualities.append({"distill_epochs": 0})
    if recipe.recovery.recover != "none":
        qualities.append(qualities[-1] | {"recover": "none"})
    if (recipe.pruning.solve, recipe.pruning.target) != ("none", "self"):
        qualities.append(qualities[-1] | {"solve": "none", "target": "self"})
    shared = recipe.rotation.mode == "shared" and not recipe.rotation.layers_per_step
    for quality in qualities:
        for steps in ({}, {"layers_per_step": LAYERS_PER_STEP}) if shared else ({},):
            changes = quality | steps
            if not changes.keys() & set(fixed):
                yield changes
