"""The identity of a run: the values that must be equal for the run to be resumed."""

import json
from typing import Any

from torch import Tensor

from drot.config import ResolvedRecipe
from drot.core.hashes import weights_record
from drot.machine.devices import dtype_name
from drot.pipeline.context import RunContext
from drot.pipeline.rotation_files import GivenRotations
from drot.text.source import calibration_hash

#: keys of a model's config that say where it came from or what program wrote it, and not what it computes
NOT_OF_THE_MODEL = ("_name_or_path", "architectures", "dtype", "transformers_version")


def calibration_record(tokens: Tensor) -> dict[str, Any]:
    """The hash and the shape of token ids [n, seqlen]."""
    return {"sha256": calibration_hash(tokens), "shape": list(tokens.shape)}


def identity_of_parts(identity: dict[str, Any]) -> dict[str, Any]:
    """What the pruned layers of an unfinished run depend on: not on a training of all layers after it.

    But layers that are trained after it are not packed before.
    """
    recovery = identity["recipe"]["recovery"]
    trains = recovery["distill_epochs"] > 0
    kept = {key: value for key, value in recovery.items() if not key.startswith("distill")}
    return {
        **{key: value for key, value in identity.items() if key != "distillation"},
        "recipe": identity["recipe"] | {"recovery": kept},
        "layers are kept": "dense" if trains else identity["format"],
    }


def known_before_the_text(recipe: ResolvedRecipe) -> dict[str, Any]:
    """What the parts of a run depend on (`identity_of_parts`), as far as the recipe alone says it."""
    known = identity_of_parts({"recipe": _recipe_identity(recipe), "format": recipe.format})
    return {key: known[key] for key in ("recipe", "format")}


def _recipe_identity(recipe: ResolvedRecipe) -> dict[str, Any]:
    found = recipe.to_dict()
    del found["calibration"]["source"]  # the tokens count, not the spelling of a path
    return found


def run_identity(run: RunContext, given: GivenRotations | None) -> dict[str, Any]:
    """The identity of a run, in plain JSON types. It must be taken before the run changes the weights.

    It does not depend on where the model and the text lie: weights and tokens are named by their hashes.
    """
    config = json.loads(run.model.config.to_json_string(use_diff=False))
    identity = {
        "weights": weights_record(run.model.model.state_dict(), parts=run.model.parts_of_state),
        "config": {key: value for key, value in config.items() if key not in NOT_OF_THE_MODEL},
        "recipe": _recipe_identity(run.recipe),
        "rotations": None if given is None else given.entry["sha256"],
        "calibration": calibration_hash(run.tokens),
        **({} if run.distill_tokens is None else {"distillation": calibration_hash(run.distill_tokens)}),
        "dtype": dtype_name(run.dtype),
        "save_dtype": dtype_name(run.save_dtype),
        "format": run.recipe.format,
        "layers": run.bases.layers,
    }
    plain: dict[str, Any] = json.loads(json.dumps(identity))
    return plain
