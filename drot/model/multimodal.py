"""Models that read images too, whose language model is of a family that drot prunes.

drot opens and prunes their language model alone. Where R1 rotates its residual stream, the linears that write
images into the stream take R1 too: images come in as the embedding of a token does. Qwen3-VL adds images to
the stream behind its first layers too (DeepStack).
"""

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from torch import nn

from drot.core.errors import UserError
from drot.model.families import FAMILIES
from drot.model.family import renamed

#: `model_type` of a model that reads images too → published models
MULTIMODAL = {
    "apertus1p5": "Apertus 1.5",
    "aya_vision": "Aya Vision",
    "cohere2_vision": "Command A Vision",
    "exaone4_5": "EXAONE 4.5",
    "gemma3": "Gemma 3",
    "gemma4": "Gemma 4 31B, Gemma 4 26B-A4B, Gemma 4 E4B, Gemma 4 E2B",
    "gemma4_unified": "Gemma 4 12B",
    "glm4v": "GLM-4.1V, GLM-4.6V-Flash",
    "glm4v_moe": "GLM-4.5V, GLM-4.6V",
    "idefics3": "Idefics3",
    "internvl": "InternVL 3, InternVL 3.5",
    "lfm2_vl": "LFM2-VL",
    "lfm3_vl": "LFM3-VL",
    "lighton_ocr": "LightOnOCR",
    "llava": "LLaVA 1.5",
    "mistral3": "Ministral 3, Mistral Small 3, Mistral Small 4",
    "qwen2_vl": "Qwen2-VL",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "qwen3_vl_moe": "Qwen3-VL with experts",
    "qwen3_5": "Qwen3.5",
    "qwen3_5_moe": "Qwen3.5 MoE",
    "smolvlm": "SmolVLM, SmolVLM2",
}
#: what their files have in front of the language model's tensors, where its own files have `model.` → what
#: they have in front of `lm_head.`; of three versions of transformers, of types with another name for the
#: language model, and of saved base models, whose head is tied
BODIES = {
    "model.language_model.model.": "language_model.",
    "language_model.model.": "language_model.",
    "model.language_model.": "",
    "model.text_model.": "",
    "model.": "",
    "language_model.": "",
    "text_model.": "",
}
#: what the names of the tensors of a language model begin with, behind `model.`
PARTS = "layers.", "embed_tokens", "norm.", "embedding_norm.", "per_layer_"
#: the linear that writes images into the residual stream in front of the first layer
PROJECTORS = (
    *("multi_modal_projector.linear_2.", "vision_projection.linear_2.", "modality_projection.proj."),
    *("visual.merger.mlp.2.", "visual.merger.linear_fc2.", "visual.merger.down_proj."),
)
#: the language models that read images as tokens, so that the embedding writes them
READ_AS_TOKENS = ("apertus1p5_text",)
#: the linears that write them behind layer 0, 1 and so on, with the number of the layer
LATER_PROJECTORS = re.compile(r"(.*visual\.deepstack_merger_list\.(\d+)\.linear_fc2\.)weight")
#: the name of the list of these linears in a language model that drot opens to prune it
WRITERS = "image_writers"
#: type of the language model of a model that reads images too → the model that computes the same for text,
#: where the three positions of a token are the same
TEXT_TYPES = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
}
#: a model that reads images too → how its published files hold the experts of a layer (`EXPERTS_IN_FILES`);
#: others together
EXPERTS_OF_MULTIMODAL = {
    "qwen3_vl_moe": "swapped",
    **dict.fromkeys(("glm4v_moe", "internvl", "lfm2_vl"), "apart"),
}
#: type of a language model that transformers opens in a model that reads images alone → its class there
UNREGISTERED = {"mistral4": "Mistral4ForCausalLM"}


@dataclass(frozen=True)
class StoredNames:
    """What the files of a model that reads images too have in front of names.

    body: for `model.`. head: for `lm_head.`. writers: for `image_writers.0.`, which writes in front of the
        first layer, `image_writers.1.`, which writes behind it, and so on; none where the stream keeps its
        basis.
    """

    body: str
    head: str
    writers: tuple[str, ...]

    def stored(self, name: str) -> str:
        """The name in the files of a tensor of the language model."""
        return renamed(name, self._prefixes)

    def own(self, stored: str) -> str | None:
        """The name in the language model of a tensor of the files; None if it is no part of it."""
        for own, prefix in self._prefixes:
            rest = stored.removeprefix(prefix)
            if rest != stored and (own != "model." or rest.startswith(PARTS)):
                return own + rest
        return None

    def is_text(self, stored: str) -> bool:
        """Whether a tensor of the files is of the language model alone."""
        own = self.own(stored)
        return own is not None and not own.startswith(f"{WRITERS}.")

    @property
    def _prefixes(self) -> list[tuple[str, str]]:
        found = [("model.", self.body), ("lm_head.", self.head)]
        return [*found, *((f"{WRITERS}.{index}.", prefix) for index, prefix in enumerate(self.writers))]


def experts_in_files(model_type: str | None) -> str:
    """How the published files of a model hold its experts (`EXPERTS_IN_FILES`)."""
    return EXPERTS_OF_MULTIMODAL.get(model_type, "together") if model_type in MULTIMODAL else "apart"


def prepare(model: Any, names: StoredNames, layers: str, shapes: Mapping[str, Iterable[int]]) -> None:
    """Gives an empty language model what `DecoderModel` needs to prune it in a model that reads images too.

    layers: the path of its decoder layers. shapes: of the tensors, by the names of the language model.
    """
    model.stored_layers = names.stored(f"{layers}.").removesuffix(".")
    writers = []
    for index in range(len(names.writers)):
        outputs, inputs = shapes[f"{WRITERS}.{index}.weight"]
        bias = f"{WRITERS}.{index}.bias" in shapes
        writers.append(nn.Linear(inputs, outputs, bias=bias, device="meta", dtype=model.dtype))
    if writers:
        setattr(model, WRITERS, nn.ModuleList(writers))


def stored_names(names: Iterable[str], model_type: str) -> StoredNames:
    """How the files of a model name its tensors, of which they have `names`.

    model_type: of the language model. Raises UserError if they lack the embedding or the projector.
    """
    names = set(names)
    body = next((each for each in BODIES if f"{each}embed_tokens.weight" in names), None)
    if body is None:
        raise UserError("the files lack embed_tokens.weight of the language model: copy the model again")
    projectors = {
        name.removesuffix("weight") for name in names for each in PROJECTORS if name.endswith(f"{each}weight")
    }
    writers: list[str] = []
    if FAMILIES[model_type].rotates_stream and model_type not in READ_AS_TOKENS:
        if len(projectors) != 1:
            raise UserError(
                f"the files must hold one of {', '.join(each + 'weight' for each in PROJECTORS)}, which "
                f"writes images into the residual stream, got {len(projectors)}: copy the model again"
            )
        later = sorted(
            (int(found[2]), found[1]) for name in names if (found := LATER_PROJECTORS.fullmatch(name))
        )
        writers = [*projectors, *(prefix for _, prefix in later)]
    return StoredNames(body, f"{BODIES[body]}lm_head.", tuple(writers))


def register(config: Any) -> None:
    """Tells AutoModelForCausalLM of the model of `config`, if transformers does not."""
    if (name := UNREGISTERED.get(config.model_type)) is not None:
        transformers.AutoModelForCausalLM.register(type(config), getattr(transformers, name), exist_ok=True)


def language_config(outer: Any) -> Any:
    """The config of the language model of a model with config `outer`, as a causal language model.

    Of a model that reads text alone, and of another that drot does not know, it is `outer` itself. From here
    on, transformers' AutoModelForCausalLM knows the language model.
    """
    text = outer.get_text_config()
    register(text)
    if outer.model_type not in MULTIMODAL:
        return outer
    text = copy.deepcopy(text)
    if text.model_type in TEXT_TYPES:
        entries = {name: value for name, value in text.to_dict().items() if name != "model_type"}
        rope = {name: each for name, each in text.rope_parameters.items() if not name.startswith("mrope_")}
        if rope.get("rope_type") == "mrope":  # the same for text as the default
            rope["rope_type"] = "default"
        if text.model_type == "glm4v_text":  # which has other defaults than GLM-4
            rope.setdefault("partial_rotary_factor", 1.0)
            entries.setdefault("head_dim", text.hidden_size // text.num_attention_heads)
        entries["rope_parameters"] = rope
        text = transformers.AutoConfig.for_model(TEXT_TYPES[text.model_type], **entries)
    text.tie_word_embeddings = outer.tie_word_embeddings
    text.dtype = outer.dtype if outer.dtype is not None else text.dtype
    if (entry := getattr(outer, "quantization_config", None)) is not None:
        text.quantization_config = entry
    return text
