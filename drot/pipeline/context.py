"""What all parts of one run share."""

import contextlib
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drot.calibration.token_weights import TokenWeights
from drot.checkpoint.records import DistillationRecord, PlaceOfStates
from drot.config import ResolvedRecipe
from drot.core.errors import UserError
from drot.core.events import Progress, ProgressEvent
from drot.machine.memory import return_free_memory
from drot.machine.ranks import ALONE, Ranks
from drot.model.decoder import DecoderModel
from drot.model.layer import DecoderLayer, Weights
from drot.model.rotation import Bases
from drot.pipeline.memory import device_memory
from drot.pipeline.sizes import Sizes, sizes_of
from drot.pipeline.watch import Watch
from drot.sparse.packed import dense_linears

#: the attribute of a loaded model that a run is changing, or changed in part before it failed
BEGUN = "_drot_begun"


def check_unchanged(model: PreTrainedModel) -> None:
    """Raises UserError for a model that a run is changing, or that a run left changed in part."""
    if BEGUN in vars(model):
        raise UserError(
            "another run changes `model`, or a run that failed may have changed a part of it: load it again"
        )


class RunContext:
    """The model, the recipe, the calibration tokens, the device, the ranks and the progress of one run.

    model: a causal language model that fits the recipe (validation.py).
    tokens: calibration token ids [nsamples, seqlen]. `training_tokens` are the first of them, with which
        rotations are trained.
    distill_tokens: those of the training of all layers together; None without it.
    device: where this rank computes.
    progress: the caller's, which `report` calls.
    save_dtype: dtype of the weights in the result; None is the dtype of the model.
    weights: where the weights of a skeleton are read from, as in DecoderModel.
    ranks: those that share the work of the run.
    source: name or folder of the model. tokenizer: that of the model, if there is one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        recipe: ResolvedRecipe,
        tokens: Tensor,
        device: torch.device,
        progress: Progress,
        save_dtype: torch.dtype | None = None,
        weights: Weights | None = None,
        ranks: Ranks = ALONE,
        distill_tokens: Tensor | None = None,
        source: str = "",
        tokenizer: Any = None,
    ) -> None:
        self.distill_tokens, self.source, self.tokenizer = distill_tokens, source, tokenizer
        #: of a training of all layers together that was asked for, and for which the text does not suffice
        self.left_out: DistillationRecord | None = None
        self.recipe, self.tokens = recipe, tokens
        self.model = DecoderModel(model, route_all=recipe.pruning.route_all, weights=weights)
        self.device, self.ranks = device, ranks
        self.home, self.dtype = self.model.device, self.model.dtype
        self.save_dtype = save_dtype or self.dtype
        #: names of the linears that the result leaves dense; None if it packs no linear
        self.dense_linears = (
            dense_linears(model.config, recipe.pruning) if recipe.format == "packed" else None
        )
        rotation = recipe.rotation
        self.rotates = rotation.mode != "none"
        self.rotates_stream = self.rotates and self.model.family.rotates_stream
        place = rotation.boundary if rotation.mode == "layer" else None
        self.bases = Bases(place, len(self.model.layers), rotation.layers_per_rotation)
        count = recipe.training_nsamples(len(tokens), tokens.shape[1], hidden_size=self.model.hidden_size)
        self.training_tokens = tokens[:count]
        #: the sequences that this rank holds
        self.own_nsamples = len(ranks.sequences(len(tokens)))
        self.place_of_states: PlaceOfStates = "main memory"
        #: of the calibration tokens, when they are known; None if all count alike
        self.token_weights: TokenWeights | None = None
        self.watch, self._progress, self._begun = Watch(device), progress, False

    def begin(self) -> None:
        """Marks a loaded model as changed, until `end`. Raises UserError if another run has marked it."""
        if self._begun or self.model.is_skeleton:
            return
        check_unchanged(self.model.model)
        vars(self.model.model)[BEGUN] = self._begun = True

    def end(self) -> None:
        vars(self.model.model).pop(BEGUN, None)

    @cached_property
    def sizes(self) -> Sizes:
        """Those of the model, with the sequences of this rank."""
        return self.new_sizes()

    def new_sizes(self) -> Sizes:
        """As `sizes`, of the model as it is now."""
        ids = self.distill_tokens
        further = None if ids is None else len(self.ranks.sequences(len(ids)))
        return sizes_of(self.model, self.own_nsamples, self.tokens.shape[1], further)

    @cached_property
    def device_memory(self) -> int:
        """About the bytes on the device while a layer is pruned, without hidden states."""
        return device_memory(self.sizes, self.recipe, self.dtype)

    def report(
        self, step: str, layer: int | None = None, *, done: int = 0, total: int = 0, loss: float | None = None
    ) -> None:
        """Tells the caller's `progress` where the run is.

        layer: counted from 0; None outside of the layers. done, total, loss: `step`, `steps` and `loss` of
            ProgressEvent.
        """
        layers = 0 if layer is None else len(self.model.layers)
        self._progress(
            ProgressEvent(phase=step, layer=layer or 0, layers=layers, step=done, steps=total, loss=loss)
        )

    @contextlib.contextmanager
    def during(
        self,
        step: str,
        layer: DecoderLayer | None = None,
        *,
        announced: bool = False,
    ) -> Iterator[None]:
        """A context in which `step` is measured. announced: whether its beginning is reported."""
        index = None if layer is None else layer.index
        self.ranks.where = f"the step {step}" + ("" if index is None else f" of layer {index}")
        if announced:
            self.report(step, index)
        try:
            with self.watch.during(step):
                yield
        finally:
            if self.model.is_skeleton:
                return_free_memory()
