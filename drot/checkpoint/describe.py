"""What drot can do with a model, by its config alone: for `drot info MODEL`."""

from dataclasses import asdict
from typing import Any

import torch

from drot.checkpoint.opening import NO_MODEL, load_outer_config, silent_transformers
from drot.checkpoint.quantization_config import (
    QUANT_METHOD,
    quantised_by,
    quantization_config_of,
    reads_quantised,
)
from drot.config.recipe_file import MANIFEST
from drot.core.errors import UserError
from drot.model.families import FAMILIES, declared
from drot.model.family import by_module
from drot.model.multimodal import language_config
from drot.model.unknown import nearest_family


def describe_model(name: str) -> dict[str, Any]:
    """What is known of the model `name`, a folder or a name on the hub. Its weights are not read.

    Raises UserError for a model that drot rotated or packed: what is known of it stands in its drot.json.

    model_type, supported: whether drot knows the family. models: published models of a known family.
    rotations: the names of those that it takes. fused: module → its slices.
    quantised, readable: the method, of a model that is quantised, and whether drot makes its weights dense.
    text_model: the type of the language model in a model that reads more than text; its family counts.
    comparison: of an unknown family, the `NearestFamily`; None if transformers has no causal language model
        of the type.
    """
    outer = load_outer_config(name)
    config = language_config(outer)
    if quantization_config_of(config).get("quant_method") == QUANT_METHOD:
        raise UserError(
            f"{name} is in a format of drot, and has no {MANIFEST}: if drot pruned it, copy it again; drot "
            "convert writes none for a model that drot did not prune"
        )
    found: dict[str, Any] = {"model_type": outer.model_type, "supported": config.model_type in FAMILIES}
    if (text := outer.get_text_config()) is not outer:
        found["text_model"] = text.model_type
    if method := quantised_by(config):
        found |= {"quantised": method, "readable": reads_quantised(config)}
    if found["supported"]:
        family = declared(config)
        found["models"] = family.models
        found["rotations"] = [rotation for rotation in ("r1", "r2", "r3") if family.takes(rotation)]
        modules = by_module(family.linears)
        found["fused"] = {one[0].path: [spec.name for spec in one] for one in modules if len(one) > 1}
        return found
    found["comparison"] = _comparison(name, config if config is not outer else text)
    return found


def _comparison(name: str, config: Any) -> dict[str, Any] | None:
    from transformers import AutoModelForCausalLM

    try:
        with silent_transformers(NO_MODEL.format(name), config.to_dict()), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except UserError:
        return None
    return asdict(nearest_family(model))
