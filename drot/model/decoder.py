"""The handle to a causal language model: its decoder layers and its ends."""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from drot.core.errors import UserError
from drot.core.hashes import Ends
from drot.machine.transfer import on_device
from drot.model.dtypes import stored_dtype
from drot.model.families import family_of, layer_families
from drot.model.family import EMBEDDED, Family
from drot.model.layer import DecoderLayer, Weights
from drot.model.linear import copied, module_at, reset_norm, scale_of, shift_of
from drot.model.multimodal import WRITERS
from drot.model.sizes import head_shape, shares_keys, widths_of

#: the attribute of a model that says how its files hold the experts of a layer: `apart`, `together` in the
#: parameters of all experts, or `swapped`, with the last two dimensions of these parameters swapped
EXPERTS_IN_FILES = "experts_in_files"
#: the arguments of a layer that each sequence has of its own
BY_SEQUENCE = {EMBEDDED}


class DecoderModel:
    """A causal language model of a supported family. Raises UserError for a model of another family.

    route_all: as in DecoderLayer.
    weights: where the weights of `model` are read from if it lies on the device `meta`; None for a model that
        has them.
    model: the Hugging Face model. family: the declaration of its parts; each layer has its own.
    widths: the sizes of the linears of its first layer; those of the attention may differ in other layers.
    """

    def __init__(self, model: Any, *, route_all: bool = False, weights: Weights | None = None) -> None:
        self.model, self.config, self._weights = model, model.config, weights
        self.family = family_of(model.config)
        self.widths = widths_of(model.config, 0)
        modules = self.layer_modules
        families = layer_families(model.config, len(modules))
        if (form := getattr(model, EXPERTS_IN_FILES, "apart")) != "apart":
            families = [
                dataclasses.replace(family, expert_files=(), swapped_in_files=form == "swapped")
                for family in families
            ]
        self.layers = [
            DecoderLayer(
                layer,
                index,
                family,
                head_shape(model.config, index),
                widths_of(model.config, index) if index else self.widths,
                route_all=route_all,
                weights=weights,
                stored=getattr(model, "stored_layers", self.family.in_files(self.family.layers)),
                stored_dtype=functools.partial(stored_dtype, model),
            )
            for index, (layer, family) in enumerate(zip(modules, families, strict=True))
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
    def lends_keys(self) -> bool:
        """Whether layers read keys and values of earlier layers, by the argument LENT."""
        return shares_keys(self.config)

    @property
    def is_skeleton(self) -> bool:
        """Whether the weights are read when they are needed, and dropped afterwards."""
        return self._weights is not None

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

    def logits_of(self, outputs: Tensor) -> Tensor:
        """The logits that the model makes of the outputs of its head, in place."""
        names = self.family.logits_divisor, self.family.logits_multiplier, self.family.logits_cap
        divisor, multiplier, cap = (None if name is None else getattr(self.config, name) for name in names)
        if multiplier is not None:
            outputs = outputs.mul_(multiplier)
        if divisor is not None:
            outputs = outputs.div_(divisor)
        if cap is None:
            return outputs
        capped = outputs.div_(cap).tanh_()
        return capped * cap if capped.requires_grad else capped.mul_(cap)  # a gradient needs the tanh

    @contextlib.contextmanager
    def in_memory(self, *paths: str) -> Iterator[None]:
        """A context in which modules outside of the layers have their weights, also those of a skeleton.

        paths: those of the modules, such as `family.head`. A head that is tied to the embedding stays so.
        """
        if self._weights is None:
            yield
            return
        tied = self.head.weight is self.embedding.weight
        read = {self.family.embedding if tied and path == self.family.head else path for path in paths}
        try:
            for path in sorted(read):
                self._weights.read_module(module_at(self.model, path), path)
            if tied:
                self.head.weight = self.embedding.weight
            yield
        finally:
            tied = self.head.weight is self.embedding.weight
            for path in read | set(paths):
                for module in module_at(self.model, path).modules():
                    for name, parameter in module.named_parameters(recurse=False):
                        empty = torch.empty_like(parameter, device="meta")
                        setattr(module, name, nn.Parameter(empty, requires_grad=False))
            if tied:
                self.head.weight = self.embedding.weight

    def norm_and_head(self, device: torch.device) -> tuple[nn.Module, nn.Module]:
        """Copies of the last norm and of the head on `device`, which share tensors that lie there."""
        with self.in_memory(*self.ends[-2:]):
            return _on(self.final_norm, device), _on(self.head, device)

    @property
    def ends(self) -> tuple[str, ...]:
        """The paths of the modules in front of the layers, the last norm and the head, for `in_memory`."""
        return (*self.family.front, self.family.final_norm, self.family.head)

    def loaded_layers(self) -> Iterator[DecoderLayer]:
        """Each layer where the model lies; those of a skeleton on the CPU, one after the other."""
        home = self.device
        return on_device(self.layers, torch.device("cpu") if home.type == "meta" else home, home)

    def parts_of_state(self, sample: int | None = None) -> Iterator[dict[str, Tensor | Ends]]:
        """The state dict of the model in parts: that of the ends, and that of each layer.

        The tensors of a skeleton hold numbers until the next part is asked for.

        sample: bytes that are needed at each end of a tensor; None needs all. No more is read of a skeleton,
            unless its files hold each expert by itself.
        """
        if sample is not None and (weights := self._weights) is not None:
            state = self.model.state_dict()
            tied = self.head.weight is self.embedding.weight
            other = {f"{self.family.head}.weight": f"{self.family.embedding}.weight"} if tied else {}
            if all(weights.holds(other.get(name, name)) for name, tensor in state.items() if tensor.is_meta):
                for name, tensor in state.items():
                    meta = tensor.is_meta
                    yield {name: weights.ends(other.get(name, name), tensor, sample) if meta else tensor}
                return
        with self.in_memory(*self.ends):
            yield dict[str, Tensor | Ends](self.state_of_ends())
        for layer in self.loaded_layers():
            prefix = f"{self.family.layers}.{layer.index}."
            yield {prefix + name: tensor for name, tensor in layer.module.state_dict().items()}

    def state_of_ends(self) -> dict[str, Tensor]:
        """What the state dict holds outside of the layers; of a skeleton, what is in memory."""
        inside, state = f"{self.family.layers}.", self.model.state_dict()
        return {name: t for name, t in state.items() if not (name.startswith(inside) or t.is_meta)}

    def check(self) -> None:
        """Raises UserError for a module that does not agree with the family and the model's config.

        Linears and norms that share their weight are refused too: each would be changed several times.
        """
        _ = self.head
        if (said := self.config.num_hidden_layers) != len(self.layers):
            raise UserError(
                f"the model must have the {said} layers that num_hidden_layers of its config says; it has "
                f"{len(self.layers)}: set config.num_hidden_layers to {len(self.layers)}"
            )
        if self.embedding.weight.shape[1] != self.hidden_size:
            raise UserError(
                f"{self.family.embedding} must have {self.hidden_size} columns, the hidden size, got "
                f"{self.embedding.weight.shape[1]}: drot prunes no model that projects its embedding"
            )
        with self.in_memory(self.family.final_norm):
            if shift_of(self.final_norm) is not None and not scale_of(self.final_norm, self.family).all():
                raise UserError(
                    f"{self.family.final_norm}.weight must hold no zero, as its bias is divided by it"
                )
        owners: dict[int, str] = {}
        for layer in self.layers:
            paths = (*layer.family.norms, *(layer.family.post_norms or ()))
            for path, norm in zip(paths, [*layer.norms, *layer.post_norms], strict=True):
                if getattr(norm, "bias", None) is not None and not layer.family.layer_norm:
                    raise UserError(f"layer {layer.index}: {path} must be an RMSNorm, got a norm with a bias")
                _own(owners, norm.weight, f"layer {layer.index}: {path}")
            for group in layer.groups:
                shifts = group.norm is not None and shift_of(module_at(layer.module, group.norm)) is not None
                for linear in layer.linears_of(group) if shifts else ():
                    if linear.bias is None:
                        raise UserError(
                            f"layer {layer.index}: {linear.name} must have a bias, as {group.norm} has one"
                        )
            for linears in layer.modules:
                name, weight = f"layer {layer.index}: {linears[0].module_name}", linears[0].parameter
                shapes = [layer.shape_of(linear.spec) for linear in linears]
                expected, got = [sum(out for out, _ in shapes), shapes[0][1]], list(weight.shape)
                if (expert := linears[0].spec.expert) is not None:
                    transposed = linears[0].spec.transposed
                    expected = [self.widths["experts"], *(reversed(expected) if transposed else expected)]
                    name = f"{name} of expert {expert}"
                if got != expected:
                    raise UserError(f"{name} must be {expected} by the model's config, got {got}")
                _own(owners, linears[0].weight, name)

    @torch.no_grad()
    def record(
        self, tokens: Tensor, empty: Callable[[Sequence[int], torch.dtype], Tensor]
    ) -> tuple[Tensor, list[dict[str, Any]]]:
        """The input [nsamples, seqlen, d] of the first layer for `tokens`, and the arguments of each layer.

        The further arguments of each layer are recorded in the model's own forward pass, so that masks, RoPE
        and sliding windows are right for every family. Neither a layer nor the last norm is computed, and the
        model is not moved.

        They are the same for all sequences, but for those in BY_SEQUENCE: of these there is a tensor
        [nsamples, seqlen, any width].

        empty: makes the tensors of the input and of these arguments, of the shape and the dtype that it gets.
        """
        recorders = [_Recorder(layer.module, self.family.returns_choice) for layer in self.layers]
        stand_ins = {self.family.layers: nn.ModuleList(recorders), self.family.final_norm: nn.Identity()}
        backbone = module_at(self.model, self.family.layers.rpartition(".")[0])
        before: dict[str, nn.Module] = {}
        found: dict[tuple[int, str], Tensor] = {}
        inputs = None
        try:
            for path, module in stand_ins.items():
                before[path] = self._replace(path, module)
            with self.in_memory(*self.family.front):
                device = self.embedding.weight.device
                for index, row in enumerate(tokens):
                    backbone(row[None].to(device), use_cache=False)
                    (first,) = recorders[0].hidden_states
                    if inputs is None:
                        inputs = empty((len(tokens), *first.shape), first.dtype)
                    inputs[index] = first
                    for place, recorder in enumerate(recorders):
                        for name in recorder.kwargs.keys() & BY_SEQUENCE:
                            (own,) = recorder.kwargs[name]
                            if index == 0:
                                found[place, name] = empty((len(tokens), *own.shape), own.dtype)
                            found[place, name][index] = own
        finally:
            for path, module in before.items():
                self._replace(path, module)
        assert inputs is not None, "there is a sequence at least"
        for (place, name), tensor in found.items():
            recorders[place].kwargs[name] = tensor
        return inputs, [recorder.kwargs for recorder in recorders]

    def _replace(self, path: str, module: nn.Module) -> nn.Module:
        """Puts `module` at a dotted path of the model, and returns what was there."""
        parent, _, name = path.rpartition(".")
        place = module_at(self.model, parent)
        before: nn.Module = getattr(place, name)
        setattr(place, name, module)
        return before

    @property
    def image_writers(self) -> Sequence[nn.Module]:
        """The linears that write images into the stream: in front of the first layer, behind it, and so on.

        There are none in a model of text, and none that must be rotated where the stream keeps its basis.
        """
        return getattr(self.model, WRITERS, ())

    @torch.no_grad()
    def rotate_ends(
        self, first_r1: Tensor, last_r1: Tensor, device: torch.device, behind: Iterable[Tensor] = ()
    ) -> bool:
        """Merges R1 [d, d] of the first layer into the embeddings and of the last into lm_head, in place.

        In a model that reads images too, the linear that writes them into the stream gets the first R1 too.

        device: where the products are computed, in fp64.
        behind: R1 of the stream behind layer 0, 1 and so on, for the linears that write images there.

        Returns whether lm_head was tied to the embedding. Tied weights are untied, also in the model's
        config, because embedding and lm_head become different matrices.
        """
        embedding, head = self.embedding, self.head
        tied = head.weight is embedding.weight
        if tied:
            head.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=False)
        self.config.tie_word_embeddings = False
        rotate_head(self.final_norm, head, self.family, last_r1, device)
        for path in self.family.embeddings:
            rotate_rows(module_at(self.model, path).weight, first_r1, device)
        r1s = (first_r1, *behind) if self.image_writers else ()
        for index, (writer, r1) in enumerate(zip(self.image_writers, r1s, strict=True)):
            assert self._weights is not None
            self._weights.read_module(writer, f"{WRITERS}.{index}")
            for parameter in writer.parameters():  # [d, inputs], and [d] of a bias
                rotate_rows(parameter.view(len(parameter), -1).mT, r1, device)
        return tied

    def zero_share(self) -> float:
        """The share of zeros among the weights of the decoder layers' linears, in [0, 1]."""
        counts = [layer.zeros() for layer in self.layers]
        return sum(zeros for zeros, _ in counts) / sum(weights for _, weights in counts)


def _on(module: nn.Module, device: torch.device) -> nn.Module:
    tensors = [*module.parameters(), *module.buffers()]
    if tensors[0].device != device:
        return cast(nn.Module, copied(module, device))
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


def _own(owners: dict[int, str], weight: Tensor, name: str) -> None:
    """Enters the owner of a weight. Raises UserError if another module of the layers has the same."""
    if weight.is_meta:
        return  # each weight of a skeleton is read from a tensor of its own
    other = owners.setdefault(weight.data_ptr() or id(weight), name)
    if other != name:
        raise UserError(
            f"{name} shares its weight with {other}, which drot would prune twice: give it its own copy, "
            "as in module.weight = torch.nn.Parameter(module.weight.detach().clone())"
        )


#: rows of the embedding and of lm_head that are copied to fp64 at a time
ROWS = 16384


@torch.no_grad()
def rotate_head(final_norm: Any, head: Any, family: Family, last_r1: Tensor, device: torch.device) -> None:
    """lm_head ← W diag(γ) last_r1, with γ of the final norm, which becomes 1. In place.

    A shift β of the norm becomes (β / γ) last_r1, because lm_head has no bias that could take it.
    """
    scale, shift = scale_of(final_norm, family), rotated_shift(final_norm, family, last_r1)
    rotate_rows(head.weight, last_r1, device, scale)
    reset_norm(final_norm, family)
    if shift is not None:
        final_norm.bias.copy_(shift)


def rotated_shift(final_norm: Any, family: Family, last_r1: Tensor) -> Tensor | None:
    """(β / γ) last_r1 [d] of the final norm, in fp64 on its device; None if it has no shift."""
    if (shift := shift_of(final_norm)) is None:
        return None
    return (shift / scale_of(final_norm, family)) @ last_r1.to(shift)


@torch.no_grad()
def rotate_rows(weight: Tensor, r1: Tensor, device: torch.device, scale: Tensor | None = None) -> None:
    """weight [rows, d] ← weight diag(scale) r1, in place, computed in fp64 on `device` and rounded once."""
    r1 = r1.to(device, torch.float64)
    scale = None if scale is None else scale.detach().to(device, torch.float64)
    for rows in weight.detach().split(ROWS):
        wide = rows.to(device).double()
        rows.copy_((wide if scale is None else wide * scale) @ r1)


class _Recorder(nn.Module):
    """Replaces a decoder layer in a forward pass: records the arguments and returns the input.

    returns_choice: that of the family.
    """

    def __init__(self, layer: nn.Module, returns_choice: bool) -> None:
        super().__init__()
        self.returns_choice = returns_choice
        self._layer = [layer]  # the list keeps the layer from becoming a submodule
        self.kwargs: dict[str, Any] = {}
        self.hidden_states: Tensor

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"][0], name)

    def forward(self, hidden_states: Tensor, *embedded: Tensor | None, **kwargs: Any) -> Any:
        self.hidden_states, self.kwargs = hidden_states, kwargs
        if any(one is not None for one in embedded):
            self.kwargs[EMBEDDED] = embedded[0]
        return (hidden_states, None) if self.returns_choice else hidden_states
