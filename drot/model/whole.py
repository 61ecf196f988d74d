"""Models that read images too, whose language model is of a family that drot prunes.

drot opens and prunes their language model alone. Where R1 rotates its residual stream, the linear that writes
images into the stream takes R1 too: images come in as the embedding of a token does.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from drot.core.errors import UserError
from drot.model.families import FAMILIES

#: `model_type` of a model that reads images too → published models
WHOLE_MODELS = {
    "gemma3": "Gemma 3",
    "gemma4": "Gemma 4 31B",
    "gemma4_unified": "Gemma 4 12B",
    "mistral3": "Ministral 3, Mistral Small 3",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_5": "Qwen3.5",
}
#: what their files have in front of the language model's tensors, where its own files have `model.` → what
#: they have in front of `lm_head.`; of three versions of transformers
BODIES = {
    "model.language_model.model.": "language_model.",
    "language_model.model.": "language_model.",
    "model.language_model.": "",
    "model.": "",
}
#: the linear that writes images into the residual stream
PROJECTORS = ("multi_modal_projector.linear_2.", "visual.merger.mlp.2.", "visual.merger.linear_fc2.")
#: the name of this linear in a language model that drot opens to prune it
PROJECTOR = "projector"


@dataclass(frozen=True)
class StoredNames:
    """What the files of a model that reads images too have in front of names.

    body: for `model.`. head: for `lm_head.`. projector: for `projector.`; None where the stream keeps its
        basis.
    """

    body: str
    head: str
    projector: str | None

    def stored(self, name: str) -> str:
        """The name in the files of a tensor of the language model."""
        for own, prefix in self._prefixes:
            if name.startswith(own):
                return prefix + name.removeprefix(own)
        return name

    def own(self, stored: str) -> str | None:
        """The name in the language model of a tensor of the files; None if it is no part of it."""
        for own, prefix in self._prefixes:
            rest = stored.removeprefix(prefix)
            if rest != stored and (own != "model." or rest.startswith(("layers.", "embed_tokens.", "norm."))):
                return own + rest
        return None

    def is_text(self, stored: str) -> bool:
        """Whether a tensor of the files is of the language model alone."""
        own = self.own(stored)
        return own is not None and not own.startswith(f"{PROJECTOR}.")

    @property
    def _prefixes(self) -> list[tuple[str, str]]:
        found = [("model.", self.body), ("lm_head.", self.head)]
        return found if self.projector is None else [*found, (f"{PROJECTOR}.", self.projector)]


def prepare(model: Any, names: StoredNames, layers: str, shape: Sequence[int], *, bias: bool) -> None:
    """Gives an empty language model what `DecoderModel` needs to prune it in a model that reads images too.

    layers: the path of its decoder layers. shape: of the weight [d, inputs] of the projector, if it is
        rotated. bias: whether the projector has one.
    """
    model.stored_layers = names.stored(f"{layers}.").removesuffix(".")
    if names.projector is not None:
        outputs, inputs = shape
        model.projector = nn.Linear(inputs, outputs, bias=bias, device="meta", dtype=model.dtype)


def stored_names(names: Iterable[str], model_type: str) -> StoredNames:
    """How the files of a model name its tensors, of which they have `names`.

    model_type: of the language model. Raises UserError if they lack the embedding or the projector.
    """
    names = set(names)
    body = next((each for each in BODIES if f"{each}embed_tokens.weight" in names), None)
    if body is None:
        raise UserError("the files lack embed_tokens.weight of the language model: copy the model again")
    projectors = {
        name.removesuffix("weight") for name in names for each in PROJECTORS if f"{each}weight" in name
    }
    projector = None
    if FAMILIES[model_type].rotates_stream:
        if len(projectors) != 1:
            raise UserError(
                f"the files must hold one of {', '.join(each + 'weight' for each in PROJECTORS)}, which "
                f"writes images into the residual stream, got {len(projectors)}: copy the model again"
            )
        (projector,) = projectors
    return StoredNames(body, f"{BODIES[body]}lm_head.", projector)


def language_config(whole: Any) -> Any:
    """The config of the language model of a model with config `whole`, as a causal language model.

    Of a model that reads text alone, and of another that drot does not know, it is `whole` itself.

    The language model of Qwen2.5-VL is a Qwen2 for text: its three positions of a token are then the same.
    """
    if whole.model_type not in WHOLE_MODELS:
        return whole
    text = copy.deepcopy(whole.get_text_config())
    if text.model_type == "qwen2_5_vl_text":
        from transformers import Qwen2Config

        entries = {name: value for name, value in text.to_dict().items() if name != "model_type"}
        rope = {name: value for name, value in text.rope_parameters.items() if name != "mrope_section"}
        text = Qwen2Config(**entries | {"rope_parameters": rope | {"rope_type": "default"}})
    text.tie_word_embeddings = whole.tie_word_embeddings
    text.dtype = whole.dtype if whole.dtype is not None else text.dtype
    if (entry := getattr(whole, "quantization_config", None)) is not None:
        text.quantization_config = entry
    return text
