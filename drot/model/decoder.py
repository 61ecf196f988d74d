"""The handle to a causal language model: its decoder layers and its ends."""

from typing import Any

import torch
from torch import Tensor, nn

from drot.core.errors import UserError
from drot.model.families import family_of, head_shape, widths_of
from drot.model.layer import DecoderLayer, module_at, reset_norm


class DecoderModel:
    """A causal language model of a supported family. Raises UserError for a model of another family.

    model: the Hugging Face model. family: the declaration of its parts. heads, widths: the sizes of its
        attention and of its linears.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config
        self.family, self.heads = family_of(model.config), head_shape(model.config)
        self.widths = widths_of(model.config)
        self.layers = [
            DecoderLayer(layer, index, self.family, self.heads, self.widths)
            for index, layer in enumerate(self.layer_modules)
        ]

    @property
    def hidden_size(self) -> int:
        return self.widths["hidden"]

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def layer_modules(self) -> nn.ModuleList:
        modules = module_at(self.model, self.family.layers)
        assert isinstance(modules, nn.ModuleList)
        return modules

    @property
    def embedding(self) -> Any:
        return module_at(self.model, self.family.embedding)

    @property
    def final_norm(self) -> Any:
        return module_at(self.model, self.family.final_norm)

    @property
    def head(self) -> Any:
        return module_at(self.model, self.family.head)

    def check(self) -> None:
        """Raises UserError for a module that does not agree with the family and the model's config."""
        _ = self.embedding, self.final_norm, self.head
        for layer in self.layers:
            for path, norm in zip(self.family.norms, layer.norms, strict=True):
                if getattr(norm, "bias", None) is not None:
                    raise UserError(f"layer {layer.index}: {path} must be an RMSNorm, got a norm with a bias")
            for linear in layer.linears.values():
                expected, got = list(layer.shape_of(linear.spec)), list(linear.weight.shape)
                if got != expected:
                    raise UserError(
                        f"layer {layer.index}: {linear.name} must be {expected} by the model's config, "
                        f"got {got}"
                    )

    @torch.no_grad()
    def record(self, tokens: Tensor, home: torch.device) -> tuple[Tensor, list[dict[str, Any]]]:
        """The input [nsamples, seqlen, d] of the first layer for `tokens`, and the arguments of each layer.

        The further arguments of each layer are recorded in the model's own forward pass, so that masks, RoPE
        and sliding windows are right for every family. No layer is computed, and the model is not moved.

        home: the device of the returned input.
        """
        recorders = [_Recorder(layer.module) for layer in self.layers]
        parent, _, name = self.family.layers.rpartition(".")
        backbone, before = module_at(self.model, parent), self.layer_modules
        device = self.embedding.weight.device
        inputs = []
        setattr(backbone, name, nn.ModuleList(recorders))
        try:
            for row in tokens:
                backbone(row[None].to(device), use_cache=False)
                inputs.append(recorders[0].hidden_states.to(home))
        finally:
            setattr(backbone, name, before)
        return torch.cat(inputs), [recorder.kwargs for recorder in recorders]

    @torch.no_grad()
    def rotate_ends(self, first_r1: Tensor, last_r1: Tensor) -> bool:
        """Merges R1 [d, d] of the first layer into the embedding and of the last into lm_head, in place.

        Returns whether lm_head was tied to the embedding. Tied weights are untied, also in the model's
        config, because embedding and lm_head become different matrices.
        """
        embedding, head = self.embedding, self.head
        tied = head.weight is embedding.weight
        if tied:
            head.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=False)
        self.config.tie_word_embeddings = False
        rotate_head(self.final_norm, head, last_r1)
        for rows in embedding.weight.detach().split(ROWS):
            rows.copy_(rows.double() @ first_r1.to(rows.device).double())
        return tied

    def zero_share(self) -> float:
        """The share of zeros among the weights of the decoder layers' linears, in [0, 1]."""
        weights = [linear.weight for layer in self.layers for linear in layer.linears.values()]
        return sum(int((weight == 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights)


#: rows of the embedding and of lm_head that are copied to fp64 at a time
ROWS = 16384


@torch.no_grad()
def rotate_head(final_norm: Any, head: Any, last_r1: Tensor) -> None:
    """lm_head ← W diag(γ) last_r1, with γ the weight of the final norm, which becomes 1. In place."""
    scale = final_norm.weight.detach().double()
    for rows in head.weight.detach().split(ROWS):
        rows.copy_((rows.double() * scale) @ last_r1.to(rows.device).double())
    reset_norm(final_norm)


class _Recorder(nn.Module):
    """Replaces a decoder layer in a forward pass: records the arguments and returns the input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = [layer]  # the list keeps the layer from becoming a submodule
        self.kwargs: dict[str, Any] = {}
        self.hidden_states: Tensor

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"][0], name)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        self.hidden_states, self.kwargs = hidden_states, kwargs
        return hidden_states
