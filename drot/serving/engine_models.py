"""What the models of drot's checkpoints in vLLM and SGLang share. Nothing here imports an engine.

drot/model/boundary.py says what the rotations are and where they act. In an engine with several
tensor-parallel ranks:

- Q [d, d] is a product of its own on every rank. Fused with down_proj, as drot.sparse.fused does it, r Q
  would be added once for each rank when their results are summed.
- R3 rotates the input of down_proj, which is divided among the ranks. A rank holds the blocks of its own
  columns, so no block may straddle two ranks.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drot.checkpoint.opening import names_in_files
from drot.checkpoint.quantization_config import DrotConfig, drot_config_of, expect_rotations
from drot.checkpoint.stored_config import StoredConfig
from drot.core.checks import counted
from drot.core.errors import UserError
from drot.model.block_rotation import DOWN_ROTATION
from drot.model.decoder import DecoderModel
from drot.model.dtypes import stored_dtype, stored_floats
from drot.model.families import family_of, layer_families
from drot.model.family import Family, by_module
from drot.model.linear import module_at
from drot.model.multimodal import StoredNames, experts_in_files, language_config
from drot.serving.engine_experts import ExpertOp, RankExperts, divide_experts
from drot.serving.requirements import check_family
from drot.serving.shares import keep_own_blocks
from drot.sparse.packed import expect_packed_experts

#: the architectures of checkpoints that an engine computes by a model of transformers
OF_TRANSFORMERS = "DrotTransformersForCausalLM"
MIXTURE_OF_TRANSFORMERS = "DrotTransformersMoEForCausalLM"


class EngineConfig(StoredConfig):
    """The class that AutoConfig finds for `model_type` drot in a process of an engine."""

    engine = ""
    families: Sequence[str] = ()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The family's config, whose `architectures` name a class of the engine or of its plugin.

        Of a model that reads images too, it is the config of the language model, which alone is served.
        Raises UserError for a family that the plugin does not have, and for a mixture that reads images whose
        files hold dense experts as [in, out].
        """
        found = super().from_dict(config_dict, **kwargs)
        outer, *unused = found if isinstance(found, tuple) else (found,)  # with return_unused_kwargs
        config = language_config(outer)
        check_family(cls.engine, cls.families, config.model_type)
        held = drot_config_of(outer)
        packed = held is not None and held.packed and not held.dense_linears
        if experts_in_files(outer.model_type) == "swapped" and not packed:
            raise UserError(
                f"drot's plugin for {cls.engine} takes no {outer.model_type} with dense linears in its "
                "layers: serve this checkpoint by `drot serve`"
            )
        config.of_multimodal = config is not outer  # its files hold more than the language model
        config.name_or_path = outer.name_or_path
        config.architectures = [cls.architecture_of(config)]
        return (config, *unused) if unused else config

    @classmethod
    def architecture_of(cls, config: Any) -> str:
        """The class for a checkpoint with `config`. Raises UserError if the engine computes it wrong."""
        raise NotImplementedError


def pruned_modules(config: Any) -> dict[str, set[str]]:
    """The modules that hold the pruned linears of a model, such as `layers.0.mlp.gate_up_proj` → the names of
    these linears."""
    return {
        f"{family.layers.removeprefix('model.')}.{index}.{linears[0].path}": {
            family.full_name(index, linear) for linear in linears
        }
        for index, family in enumerate(layer_families(config, config.num_hidden_layers))
        for linears in by_module(family.linears)
    }


def modules_left_dense(config: Any, dense: set[str]) -> set[str]:
    """The modules of which drot left a linear dense. dense: the names of these linears."""
    return {name for name, linears in pruned_modules(config).items() if linears & dense}


def graphs_hold_experts(config: Any, dtype: torch.dtype) -> bool:
    """Whether a CUDA graph can hold the experts of a mixture in `dtype`, as `ReplacedExperts.waits` says."""
    held = drot_config_of(config)
    if held is None or not held.packed or dtype == torch.float32:
        return False
    families = layer_families(config, config.num_hidden_layers)
    dense = {
        family.full_name(index, linear)
        for index, family in enumerate(families)
        for linear in family.linears
        if linear.expert is not None
    }.intersection(held.dense_linears)
    silu = all(family.gated is None for family in families) and getattr(config, "hidden_act", None) == "silu"
    return not dense and (silu or held.down_rotation is None)


def unpruned_linears(config: Any) -> set[str]:
    """The linears in the layers of a model that read the stream, and that drot never prunes."""
    return {
        f"{family.layers.removeprefix('model.')}.{index}.{path}"
        for index, family in enumerate(layer_families(config, config.num_hidden_layers))
        for path, _ in family.unpruned
    }


def linears_besides(model: nn.Module, config: Any) -> set[str]:
    """The linears of a model of transformers that drot does not prune, such as Q."""
    linears = {name for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    return linears - pruned_modules(config).keys()


def refuse_expert_parallelism() -> None:
    """Raises UserError, for an engine that would give each rank whole experts."""
    raise UserError(
        "drot's plugin divides the channels of each expert among the ranks, and not the experts: serve this "
        "checkpoint without expert parallelism"
    )


def logits_scale(config: Any) -> float:
    """The number by which a model multiplies its logits."""
    family = family_of(config)
    names = family.logits_multiplier, family.logits_divisor
    multiplier, divisor = (1.0 if name is None else float(getattr(config, name)) for name in names)
    return multiplier / divisor


def expect_held(model: Any, held: DrotConfig) -> set[str]:
    """Adds the rotations to an empty model of transformers, and packed experts. Packed linears are those of
    the engine. Returns the names of the buffers that a checkpoint holds."""
    expect_rotations(model, held)
    for layer in DecoderModel(model).layers if held.packed else ():
        expect_packed_experts(layer, held.dense_linears)
    buffers = dict(model.named_buffers())
    return {name for name, _ in stored_floats(model) if name in buffers}


def keep_own_share(
    layers: Iterable[nn.Module],
    config: Any,
    *,
    missing: type[nn.Module],
    rank: int,
    ranks: int,
    add: Callable[[Tensor], Tensor],
    op: ExpertOp,
) -> dict[str, RankExperts]:
    """Lets decoder layers of transformers keep what a rank has of R3 and of the experts.

    missing: the engine's class of layers that another pipeline-parallel rank has. add: adds the outputs of
    the experts of all ranks. op: computes the experts of a layer. Returns the experts by their names.
    """
    found = {}
    families = layer_families(config, config.num_hidden_layers)
    for index, (layer, family) in enumerate(zip(layers, families, strict=True)):
        if isinstance(layer, missing):
            continue
        if family.experts is not None:
            name = f"{family.layers}.{index}.{family.experts}"
            found[name] = divide_experts(layer, family, name, rank=rank, ranks=ranks, add=add, op=op)
        for path in family.down_modules:
            mlp = module_at(layer, path)
            if path == family.experts or not hasattr(mlp, DOWN_ROTATION):
                continue
            down = module_at(mlp, family.mlp_parts(path)[1])
            if getattr(down, "input_is_parallel", False):
                keep_own_blocks(getattr(mlp, DOWN_ROTATION), rank, ranks)
    return found


@torch.no_grad()
def keep_in_fp32(model: Any) -> None:
    """Lets an empty model of transformers have the dtypes that `drot.load` gives it.

    An engine builds all tensors in one dtype, also a router that transformers has in fp32.
    """
    dtype = torch.get_default_dtype()
    for name, tensor in stored_floats(model):
        if tensor.dtype == dtype and (kept := stored_dtype(model, name, dtype)) != dtype:
            tensor.data = tensor.data.to(kept)


class CompleteWeights:
    """Mixin in front of a model of an engine, which refuses a checkpoint that lacks a tensor; the engine does
    not look.

    engine: its name, for messages. checkpoint: the folder. held_config: what EngineConfig returned.
    stages: the number of pipeline-parallel ranks.
    renamed: the stock names of the tensors that have NORM_PREFIX in the checkpoint, where the model has them.
    stored_buffers: the names of the buffers that the checkpoint holds.
    packed_modules_mapping: a stacked linear of the model → the linears of the checkpoint.
    """

    engine: str
    checkpoint: str
    held_config: Any
    stages: int
    renamed: Mapping[str, str] = {}
    stored_buffers: Collection[str] = ()
    packed_modules_mapping: Mapping[str, list[str]]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Loads the tensors of a checkpoint by the engine's loaders, and returns the names of the parameters.

        Raises UserError if a tensor is missing, also a norm whose name does not say that its layer rotates,
        and if the engine's model leaves one out, such as a bias.
        """
        found: set[str] = set()
        names = self._names_in_files() if self.held_config.of_multimodal else None

        def named() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if names is not None:
                    if not names.is_text(name):  # a part of what reads images
                        continue
                    name = names.own(name) or name
                found.add(name)
                yield self.renamed.get(name, self._in_model(name)), tensor

        stock: Any = super()
        loaded: set[str] = stock.load_weights(named())
        module: Any = self
        for experts in module.modules():
            if isinstance(experts, RankExperts):
                experts.check_loaded()
        stored = set(self._stored_names())
        if missing := sorted(stored - found):
            raise UserError(
                f"the checkpoint lacks {counted(len(missing), 'tensor')}, the first is {missing[0]}: it is "
                "incomplete or of another architecture; copy it again"
            )
        left_out = found - stored - {self._in_files(name) for name, _ in module.named_buffers()}
        if left_out and self.stages == 1:  # of several, another rank may hold it
            raise UserError(
                f"{self.engine}'s model does not read {counted(len(left_out), 'tensor')} of the checkpoint, "
                f"the first is {min(left_out)}: serve this checkpoint by `drot serve`"
            )
        return loaded

    def _names_in_files(self) -> StoredNames | None:
        if not Path(self.checkpoint).is_dir():
            raise UserError(
                f"the plugin reads a model that reads images too from a folder, got {self.checkpoint}: "
                "download it, and name its folder"
            )
        return names_in_files(Path(self.checkpoint), self.held_config.model_type)

    def _stored_names(self) -> Iterator[str]:
        """The name in the checkpoint of each parameter, and of each part of a stacked one."""
        stored = {stock: name for name, stock in self.renamed.items()}
        module: Any = self
        experts = {name: each for name, each in module.named_modules() if isinstance(each, RankExperts)}
        for path, each in experts.items():
            yield from (self._in_files(f"{path}.{name}") for name in each.stored_names())
        buffers = dict(module.named_buffers())  # without those of another pipeline-parallel rank
        yield from (self._in_files(name) for name in self.stored_buffers if name in buffers)
        for name, _ in module.named_parameters():
            if name.startswith(tuple(f"{path}." for path in experts)):
                continue
            path, _, tensor = name.rpartition(".")
            path, _, last = path.rpartition(".")
            for part in self.packed_modules_mapping.get(last, [last]):
                stock = ".".join(filter(None, (path, part, tensor)))
                yield stored.get(stock, self._in_files(stock))

    def _in_files(self, name: str) -> str:
        """The name in files of a tensor of the model of transformers."""
        return self._with_layer(name, lambda family, own: family.name_in_files(own))

    def _in_model(self, name: str) -> str:
        """The name that the engine expects of a tensor with this name in files."""
        return name  # vLLM has the renames of transformers

    def _with_layer(self, name: str, rename: Callable[[Family, str], str]) -> str:
        """The name of a tensor, with another name in its layer."""
        layers = f"{family_of(self.held_config).layers}."
        if not name.startswith(layers):
            return name
        index, _, own = name.removeprefix(layers).partition(".")
        return f"{layers}{index}.{rename(self._families[int(index)], own)}"

    @cached_property
    def _families(self) -> list[Family]:
        return layer_families(self.held_config, self.held_config.num_hidden_layers)
