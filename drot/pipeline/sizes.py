"""The sizes of a model and of its calibration, from which the needs of a run follow."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from drot.config import ResolvedRecipe
from drot.model.decoder import DecoderModel
from drot.model.dtypes import stored_dtype
from drot.model.family import InputGroup
from drot.model.layer import DecoderLayer
from drot.model.multimodal import WRITERS
from drot.model.sizes import HeadShape, lends_keys, routed_share


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model and of its calibration.

    layers: the decoder layers, which know the shapes of their linears; a run changes none of these.
    hidden: the hidden size. heads: those of the layer with the widest attention.
    rotates_stream: whether R1 rotates the residual stream.
    layer_weights, weights, outside: numbers in the parameters of the largest layer, of the model, and of the
        model without its layers. What writes images into the stream does not count.
    head: numbers in lm_head. untied_head: the same if a rotation unties it from the embedding; else 0.
    in_fp32: dtype of a checkpoint → numbers that it holds in fp32 nevertheless.
    nsamples, seqlen: sequences of calibration tokens, and tokens in a sequence.
    further: sequences on which all layers are trained together; None if they are not known, and are as many
        as the recipe says.
    routed: the share of the tokens that an expert reads, on average.
    embedded, lent: numbers of a token beside its hidden state: in the embeddings that layers have of their
        own, and in the keys and values that layers lend.
    """

    layers: Sequence[DecoderLayer]
    hidden: int
    heads: HeadShape
    rotates_stream: bool
    layer_weights: int
    weights: int
    outside: int
    head: int
    untied_head: int
    nsamples: int
    seqlen: int
    in_fp32: Mapping[torch.dtype, int]
    routed: float = 1.0
    embedded: int = 0
    lent: int = 0
    further: int | None = None

    def share(self, group: InputGroup) -> float:
        """The share of the tokens that a group reads."""
        return 1.0 if group.expert is None else self.routed

    @property
    def tokens(self) -> int:
        return self.nsamples * self.seqlen

    @property
    def state(self) -> int:
        """The numbers of a token in a stream of the calibration."""
        return self.hidden + self.embedded + self.lent

    def pruned(self, recipe: ResolvedRecipe) -> list[list[str]]:
        """For each layer, the names of the linears that the recipe prunes."""
        sparsity_for = recipe.pruning.sparsity_for
        return [
            [name for name, linear in layer.linears.items() if sparsity_for(linear.full_name).ratio > 0]
            for layer in self.layers
        ]


def groups_of(layer: DecoderLayer, linears: Collection[str]) -> list[InputGroup]:
    """The groups of a layer with those of their linears that are in `linears`."""
    found = (
        dataclasses.replace(group, linears=tuple(one for one in group.linears if one.name in linears))
        for group in layer.groups
    )
    return [group for group in found if group.linears]


def sizes_of(model: DecoderModel, nsamples: int, seqlen: int, further: int | None = None) -> Sizes:
    """The sizes of a model, which may lie on the device `meta`. The numbers are those of Sizes."""
    head = model.head.weight
    of_layers = [sum(p.numel() for p in layer.module.parameters()) for layer in model.layers]
    named = {
        name: parameter.numel()
        for name, parameter in model.model.named_parameters()
        if not name.startswith(f"{WRITERS}.")
    }
    weights = sum(named.values())
    return Sizes(
        layers=model.layers,
        hidden=model.hidden_size,
        heads=max((layer.heads for layer in model.layers), key=lambda heads: heads.heads * heads.head_dim),
        rotates_stream=model.family.rotates_stream,
        layer_weights=max(of_layers),
        weights=weights,
        outside=weights - sum(of_layers),
        in_fp32={
            dtype: sum(
                size for name, size in named.items() if stored_dtype(model.model, name, dtype) != dtype
            )
            for dtype in (torch.bfloat16, torch.float16)
        },
        head=head.numel(),
        untied_head=head.numel() if head is model.embedding.weight and model.family.rotates_stream else 0,
        nsamples=nsamples,
        seqlen=seqlen,
        further=further,
        routed=routed_share(model.config),
        embedded=len(model.layers) * model.widths["embedded"],
        lent=sum(
            2 * layer.heads.kv_heads * layer.heads.head_dim
            for layer in model.layers
            if lends_keys(model.config, layer.index)
        ),
    )


def without_weights(config: Any) -> PreTrainedModel:
    """A model on the device `meta`, which holds no numbers."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model
