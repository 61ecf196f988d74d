"""What the models of drot's checkpoints in vLLM and SGLang share. Nothing here imports an engine.

drot/model/boundary.py says what the rotations are and where they act. In an engine with several
tensor-parallel ranks:

- Q [d, d] is a product of its own on every rank. Fused with down_proj, as drot.sparse.fused does it, r Q
  would be added once for each rank when their results are summed.
- R3 rotates the input of down_proj, which is divided among the ranks. A rank holds the blocks of its own
  columns, so no block may straddle two ranks.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from drot.checkpoint.opening import names_in_files
from drot.checkpoint.stored_config import StoredConfig
from drot.core.checks import counted
from drot.core.errors import UserError
from drot.machine.devices import check_gpu, is_gpu
from drot.model.block_rotation import DOWN_ROTATION, BlockRotation
from drot.model.families import family_of, layer_families
from drot.model.family import by_module
from drot.model.linear import module_at
from drot.model.multimodal import StoredNames, language_config
from drot.model.sizes import experts_of
from drot.serving.requirements import check_family

#: the architecture of checkpoints that an engine computes by a model of transformers
OF_TRANSFORMERS = "DrotTransformersForCausalLM"


class EngineConfig(StoredConfig):
    """The class that AutoConfig finds for `model_type` drot in a process of an engine."""

    engine = ""
    families: Sequence[str] = ()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The family's config, whose `architectures` name a class of the engine or of its plugin.

        Of a model that reads images too, it is the config of the language model, which alone is served.
        Raises UserError for a family that the plugin does not have, and for a mixture of experts.
        """
        found = super().from_dict(config_dict, **kwargs)
        outer, *unused = found if isinstance(found, tuple) else (found,)  # with return_unused_kwargs
        config = language_config(outer)
        check_family(cls.engine, cls.families, config.model_type)
        if experts_of(config):  # as the largest model of gemma4_text
            raise UserError(
                f"drot's plugin for {cls.engine} serves no mixture of experts: serve this checkpoint by "
                "`drot serve`"
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


def linears_besides(model: nn.Module, config: Any) -> set[str]:
    """The linears of a model of transformers that drot does not prune, such as Q."""
    linears = {name for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    return linears - pruned_modules(config).keys()


def logits_scale(config: Any) -> float:
    """The number by which a model multiplies its logits."""
    family = family_of(config)
    names = family.logits_multiplier, family.logits_divisor
    multiplier, divisor = (1.0 if name is None else float(getattr(config, name)) for name in names)
    return multiplier / divisor


def keep_own_blocks(rotation: BlockRotation, rank: int, ranks: int) -> None:
    """Replaces the blocks of an R3 on the device `meta` by uninitialised ones, those of a rank.

    Raises UserError if a block would straddle two ranks.
    """
    count, size = rotation.weight.shape[:2]
    if count % ranks:
        raise UserError(
            f"the {count} blocks of down_rotation, of {size} columns each, cannot be divided among "
            f"{ranks} tensor-parallel ranks without cutting a block: choose another number of ranks"
        )
    own = count // ranks
    device = torch.get_default_device()  # an engine sets it and the dtype while it builds a model
    if is_gpu(device):
        check_gpu(device)  # of a dense checkpoint nothing else does
    weight: Any = nn.Parameter(torch.empty(own, size, size, device=device), requires_grad=False)

    def load(parameter: Tensor, loaded: Tensor) -> None:
        parameter.data.copy_(loaded.narrow(0, rank * own, own))

    weight.weight_loader = load
    rotation.weight = weight


def keep_own_blocks_of(
    layers: Iterable[nn.Module], config: Any, *, missing: type[nn.Module], rank: int, ranks: int
) -> None:
    """Lets the R3 of decoder layers of transformers keep the blocks for the columns of a rank's down_proj.

    missing: the engine's class of layers that another pipeline-parallel rank has.
    """
    family = family_of(config)
    for layer in layers:
        for path in () if isinstance(layer, missing) else family.down_modules:
            mlp = module_at(layer, path)
            down = module_at(mlp, family.mlp_parts(path)[1])
            if hasattr(mlp, DOWN_ROTATION) and getattr(down, "input_is_parallel", False):
                keep_own_blocks(getattr(mlp, DOWN_ROTATION), rank, ranks)


class CompleteWeights:
    """Mixin in front of a model of an engine, which refuses a checkpoint that lacks a tensor; the engine does
    not look.

    engine: its name, for messages. checkpoint: the folder. held_config: what EngineConfig returned.
    stages: the number of pipeline-parallel ranks.
    renamed: the stock names of the tensors that have NORM_PREFIX in the checkpoint, where the model has them.
    packed_modules_mapping: a stacked linear of the model → the linears of the checkpoint.
    """

    engine: str
    checkpoint: str
    held_config: Any
    stages: int
    renamed: Mapping[str, str] = {}
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
                yield self.renamed.get(name, name), tensor

        stock: Any = super()
        loaded: set[str] = stock.load_weights(named())
        stored, module = set(self._stored_names()), cast(Any, self)
        if missing := sorted(stored - found):
            raise UserError(
                f"the checkpoint lacks {counted(len(missing), 'tensor')}, the first is {missing[0]}: it is "
                "incomplete or of another architecture; copy it again"
            )
        left_out = found - stored - {name for name, _ in module.named_buffers()}
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
        for name, _ in module.named_parameters():
            path, _, tensor = name.rpartition(".")
            path, _, last = path.rpartition(".")
            for part in self.packed_modules_mapping.get(last, [last]):
                stock = ".".join(filter(None, (path, part, tensor)))
                yield stored.get(stock, stock)
