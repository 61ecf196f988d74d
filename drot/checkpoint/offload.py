"""A model whose weights stay in their files (disk offload), and are read when their turn comes.

The model is a skeleton: its parameters lie on the device `meta`, which holds no numbers.
"""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drot.checkpoint.integrity import CONFIG_FILE, verified_while_loading
from drot.checkpoint.multimodal import MultimodalFolder
from drot.checkpoint.opening import (
    NO_MODEL,
    checked_headers,
    drop_prediction_layers,
    empty_model,
    load_config,
    names_in_files,
    refuse_missing,
    refuse_not_finite,
    silent_transformers,
)
from drot.checkpoint.pieces import PieceReader
from drot.checkpoint.quantised import Quantised
from drot.checkpoint.quantization_config import refuse_quantised
from drot.checkpoint.source import DENSE_DTYPES, Header, gguf_file, model_folder, shapes_of
from drot.core.errors import UserError
from drot.core.hashes import Ends, ends_of
from drot.machine.devices import parse_dtype
from drot.machine.memory import available_memory, return_large_blocks
from drot.model.boundary import check_rotations
from drot.model.decoder import EXPERTS_IN_FILES, DecoderModel
from drot.model.families import family_of
from drot.model.layer import DecoderLayer
from drot.model.linear import module_at
from drot.model.multimodal import WRITERS, prepare
from drot.model.stored import stored_tensors
from drot.sparse.fused import fuse
from drot.sparse.linear import is_packed, packed_weights
from drot.sparse.packed import check_packed_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: a model whose weights, times this, exceed the free memory: the C library then keeps nothing that was freed
FEW_TIMES = 4
#: the dtypes in safetensors files that drot reads
FILE_DTYPES = DENSE_DTYPES | {"U8": torch.uint8}  # the positions of packed weights


class DiskWeights:
    """The tensors of a model in its safetensors files (`drot.model.decoder.Weights`).

    The files are read and not mapped: the system ends a process that reads a mapped file which was cut off.

    path: the model, for messages.
    headers: tensor → its header, of a complete file.
    stored: gives the name in the files of a tensor that they hold under another.
    """

    def __init__(
        self, path: str | Path, headers: Mapping[str, Header], stored: Callable[[str], str] = str
    ) -> None:
        self._path, self._headers, self._stored = path, headers, stored
        self._reader = PieceReader()

    @torch.no_grad()
    def read_layer(self, layer: DecoderLayer, device: torch.device) -> None:
        """Reads the tensors of a layer on the device `meta` to `device`, in the dtypes of the layer.

        For a GPU, no more than the pieces of a PieceReader are in main memory at a time.

        Raises UserError for a tensor that is damaged, as one that is not finite, and for a file that was
        changed.
        """
        layer.module.to_empty(device=device)
        self._read(stored_tensors(layer))
        for name, weight in packed_weights(layer.module):
            check_packed_tensors(layer.prefix + name, weight.values, weight.positions)
        check_rotations(layer.module, layer.prefix.removesuffix("."))

    @torch.no_grad()
    def read_module(self, module: nn.Module, name: str) -> None:
        """The same for the parameters of a module outside of the layers. name: the name of the module."""
        for own, parameter in list(module.named_parameters()):
            target = torch.empty_like(parameter, device="cpu")
            self._read({f"{name}.{own}": target})
            owner, _, last = own.rpartition(".")
            setattr(module.get_submodule(owner), last, nn.Parameter(target, requires_grad=False))

    def holds(self, name: str) -> bool:
        """Whether the files hold a tensor."""
        return self._name(name) in self._headers

    def narrow(self, module: nn.Module) -> None:
        """Gives parameters of an empty model the dtype of the files where that has fewer bytes.

        transformers opens the router of some mixtures in fp32, whatever the files hold.
        """
        for name, parameter in module.named_parameters():
            header = self._headers.get(self._name(name))
            if header is None or isinstance(header, Quantised):
                continue
            stored = FILE_DTYPES[header.dtype]
            if stored.itemsize < parameter.dtype.itemsize:
                parameter.data = parameter.data.to(stored)

    def _name(self, name: str) -> str:
        return name if name in self._headers else self._stored(name)

    @torch.no_grad()
    def ends(self, name: str, like: Tensor, sample: int) -> Ends:
        """The `sample` bytes at both ends of a tensor, in the dtype of `like`, which has its shape."""
        found = []
        for end in ends_of(like.numel(), like.element_size(), sample):
            found.append(torch.empty(end.stop - end.start, dtype=like.dtype))
            self._read({name: found[-1]}, end.start)
        return Ends(like, tuple(found))

    @torch.no_grad()
    def equal(self, *names: str) -> bool:
        """Whether tensors of the files have the same numbers."""
        headers = {name: self._headers[self._name(name)] for name in names}
        found = {name: torch.empty(h.shape, dtype=DENSE_DTYPES[h.dtype]) for name, h in headers.items()}
        self._read(found)
        first, *others = found.values()
        return all(torch.equal(first, other) for other in others)

    def _read(self, targets: Mapping[str, Tensor], first: int = 0) -> None:
        """Reads tensors into tensors on any device, which may have another dtype.

        first: the value of a tensor with which its target begins.
        """
        for name, target in targets.items():
            header = self._headers[self._name(name)]
            if target.is_contiguous():
                self._read_values(header, target, first)
            else:  # of all experts, in files that hold them swapped
                for index, of_expert in enumerate(target):
                    values = torch.empty(of_expert.shape, dtype=target.dtype, device=target.device)
                    self._read_values(header, values, first + index * values.numel())
                    of_expert.copy_(values)
            refuse_not_finite(self._path, name, target)

    def _read_values(self, header: Header, target: Tensor, first: int) -> None:
        """Reads values of a tensor from value `first` on into a contiguous tensor."""
        if isinstance(header, Quantised):
            header.read(self._reader, target, first)
        else:
            dtype = FILE_DTYPES[header.dtype]
            self._reader.read(target, header.file, header.start + first * dtype.itemsize, dtype)


def open_skeleton(
    path: str | Path, dtype: str | torch.dtype = "auto", *, verify: bool = True
) -> "tuple[PreTrainedModel, DiskWeights, torch.dtype]":
    """The model at `path` without its weights, its weights on the disk, and the dtype of the checkpoint.

    What `load_model` would return, with all parameters on the device `meta` and all buffers in main memory.
    Raises UserError as `load_model` does; a weight that is not finite is refused when it is read.

    path: a hub name or a folder with a model of a family that drot prunes, or a checkpoint that drot wrote.
        Its packed linears are not fused.
        Of a model that reads images too, it is the language model.
    dtype: the dtype of the parameters; `auto` is the dtype of the checkpoint.
    verify: as in `load_model`.
    """
    if gguf_file(path) is not None:
        raise UserError(
            f"{path} is a GGUF file, which drot cannot read layer by layer: only prune or load it"
        )
    config = load_config(path)
    refuse_quantised(config)
    family_of(config)
    from transformers import GenerationConfig

    folder = model_folder(path, weights=True)
    with verified_while_loading(folder) if verify else contextlib.nullcontext():
        headers = checked_headers(path, config, folder)
        own = config.dtype or _first_dtype(headers)
        chosen = own if dtype == "auto" else parse_dtype(dtype)
        with silent_transformers(NO_MODEL.format(str(path)), config.to_dict()):
            model = empty_model(path, config, folder, headers, chosen)
            model.config.name_or_path = str(folder)
            model.config.dtype = chosen  # transformers 5.4 leaves the dtype of the file there
            drop_prediction_layers(model.config)
            try:
                model.generation_config = GenerationConfig.from_pretrained(folder)
            except OSError:  # there is no such file
                model.generation_config = GenerationConfig.from_pretrained(
                    folder, config_file_name=CONFIG_FILE, _from_model_config=True
                )
            _compute_buffers(model)
    weights = _weights_of(path, model, headers, folder)
    _tie(path, model, weights)
    if FEW_TIMES * sum(parameter.nbytes for parameter in model.parameters()) > available_memory():
        return_large_blocks()
    return model.eval().requires_grad_(False), weights, own


def _weights_of(path: str | Path, model: Any, headers: Mapping[str, Header], folder: Path) -> DiskWeights:
    """The weights on the disk of an empty model, whose files may have other names for them.

    headers: by the names of the model.
    """
    if (names := names_in_files(folder, model.config.model_type)) is None:
        family = family_of(model.config)
        prefix = family.in_files(f"{model.base_model_prefix}.")
        without_prefix = not any(name.startswith(prefix) for name in headers)

        def stored(name: str) -> str:
            name = family.in_files(name)
            return name.removeprefix(prefix) if without_prefix else name

        return DiskWeights(path, headers, stored)
    model.drot_multimodal = MultimodalFolder(folder, names)
    prepare(model, names, family_of(model.config).layers, shapes_of(headers))
    return DiskWeights(path, {names.stored(name): each for name, each in headers.items()}, names.stored)


@torch.no_grad()
def load_by_layers(path: str | Path, dtype: str | torch.dtype, *, verify: bool) -> "PreTrainedModel":
    """A model with its weights, as `load_model` returns it, whose files transformers would open otherwise.

    The model reads images too, or its weights are quantised.
    """
    model: Any
    model, weights, _ = open_skeleton(path, dtype, verify=verify)
    decoder = DecoderModel(model, weights=weights)
    for layer in decoder.layers:
        weights.read_layer(layer, torch.device("cpu"))
    tied = decoder.head.weight is decoder.embedding.weight
    for end in decoder.ends:
        if not tied or end != decoder.family.head:
            weights.read_module(module_at(model, end), end)
    if tied:
        decoder.head.weight = decoder.embedding.weight
    # a model of text alone from here on
    for name in ("drot_multimodal", "stored_layers", EXPERTS_IN_FILES, WRITERS):
        if hasattr(model, name):
            delattr(model, name)
    if is_packed(model):
        fuse(model)
    return model


def _first_dtype(headers: Mapping[str, Header]) -> torch.dtype:
    """The dtype that transformers takes for a checkpoint whose config.json names none."""
    found = (DENSE_DTYPES[header.dtype] for header in headers.values() if header.dtype in DENSE_DTYPES)
    return next(found, torch.float32)


def _compute_buffers(model: Any) -> None:
    """Computes the buffers that no file holds, such as the frequencies of RoPE, as transformers does."""
    for module in model.modules():
        names = module._non_persistent_buffers_set
        for name in names:
            if (buffer := getattr(module, name)) is not None:
                setattr(module, name, torch.empty_like(buffer, device="cpu"))
        if names:
            model._init_weights(module)


def _tie(path: str | Path, model: Any, weights: DiskWeights) -> None:
    """Unties the head if the files hold another head than the embedding, as transformers does.

    Raises UserError if the files hold no head and it is not tied.
    """
    family = family_of(model.config)
    head, embedding = f"{family.head}.weight", f"{family.embedding}.weight"
    tied = model.get_parameter(head) is model.get_parameter(embedding)
    if not weights.holds(head):
        refuse_missing(path, model, [] if tied else [head])
    elif tied and not weights.equal(head, embedding):
        module = model.get_submodule(family.head)
        module.weight = nn.Parameter(torch.empty_like(module.weight), requires_grad=False)
        model.all_tied_weights_keys.pop(head)
