"""The models of drot's checkpoints in vLLM: vLLM's own, with the rotations that a checkpoint holds.

Families of which vLLM has no such model are in drot/serving/vllm_transformers.py.

drot/model/boundary.py says what the rotations are and where they act. In vLLM:

- Q [d, d] is a product of its own on every tensor-parallel rank. Fused with down_proj, as drot.sparse.fused
  does it, r Q would be added once for each rank when their results are summed.
- R3 rotates the input of down_proj, which is divided among the ranks. A rank holds the blocks of its own
  columns, so no block may straddle two ranks.

vLLM's decoder layers return the MLP's output and the residual r before they are added. So `residual` is the
stock forward followed by r ← r Q, and `input` is h ← h Q followed by the stock forward.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.distributed import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.ernie45 import Ernie4_5ForCausalLM
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.phi3 import Phi3ForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.utils import PPMissingLayer

from drot.checkpoint.opening import names_in_files
from drot.config import BoundaryPlace
from drot.core.checks import counted
from drot.core.errors import UserError
from drot.machine.devices import check_gpu, is_gpu
from drot.model.block_rotation import DOWN_ROTATION, BlockRotation
from drot.model.boundary import NORM_PREFIX, ROTATION_MODULE
from drot.model.families import layer_families
from drot.model.family import by_module
from drot.model.mixins import mix
from drot.model.multimodal import StoredNames

SILU = nn.SiLU()  # the activation of all MLPs here; vLLM refuses another one for these families


class VllmRotatedMLP:
    """Mixin in front of vLLM's class of gated MLPs, for an MLP that holds R3."""

    gate_up_proj: nn.Module
    down_rotation: BlockRotation
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, d] -> what the stock forward returns."""
        gate_up, _ = self.gate_up_proj(x)
        gate, up = gate_up.chunk(2, dim=-1)
        output, _ = self.down_proj(self.down_rotation(gate, up, SILU))
        return output


class VllmRotatedLayer:
    """Mixin in front of vLLM's class of decoder layers, for a layer that holds Q."""

    boundary_place: BoundaryPlace
    residual_rotation: nn.Module

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """hidden_states, residual [tokens, d], whose sum is the stream -> the same two after the layer."""
        if self.boundary_place == "input":
            stream = hidden_states if residual is None else hidden_states + residual
            hidden_states, residual = self.residual_rotation(stream), None
        stock: Any = super()
        output, residual = stock.forward(positions, hidden_states, residual, **kwargs)
        if self.boundary_place == "residual":
            residual = self.residual_rotation(residual)
        assert residual is not None
        return output, residual


def add_boundary_rotation(layer: Any, place: BoundaryPlace, size: int) -> None:
    """Adds an uninitialised Q [size, size] to a decoder layer. Its weight is Qᵀ, on each rank the whole.

    Raises UserError for a layer whose forward vLLM has replaced, as it does to offload the layer's weights:
    the forward of VllmRotatedLayer would not be called.
    """
    if "forward" in vars(layer):
        raise UserError(
            "drot's plugin cannot rotate a layer whose forward vLLM has replaced to offload its weights: "
            "serve it without offloading"
        )
    rotation = ReplicatedLinear(size, size, bias=False, return_bias=False)
    setattr(layer, ROTATION_MODULE, rotation)
    layer.boundary_place = place
    mix(layer, VllmRotatedLayer)


def add_down_rotation(mlp: Any, width: int, size: int) -> None:
    """Adds an uninitialised R3 to an MLP: of its width/size blocks [size, size] those of this rank.

    Raises UserError if a block would straddle two ranks.
    """
    rotation = BlockRotation(width // size, size, dtype=torch.get_default_dtype(), device="meta")
    keep_own_blocks(rotation)
    setattr(mlp, DOWN_ROTATION, rotation)
    mix(mlp, VllmRotatedMLP)


def keep_own_blocks(rotation: BlockRotation) -> None:
    """Replaces the blocks of an R3 on the device `meta` by uninitialised ones, those of this rank.

    Raises UserError if a block would straddle two ranks.
    """
    count, size = rotation.weight.shape[:2]
    ranks = get_tensor_model_parallel_world_size()
    if count % ranks:
        raise UserError(
            f"the {count} blocks of down_rotation, of {size} columns each, cannot be divided among "
            f"{ranks} tensor-parallel ranks without cutting a block: choose another number of ranks"
        )
    own = count // ranks
    device = torch.get_default_device()  # vLLM sets it and the dtype while it builds a model
    if is_gpu(device):
        check_gpu(device)  # of a dense checkpoint nothing else does
    weight: Any = nn.Parameter(torch.empty(own, size, size, device=device), requires_grad=False)

    def load(parameter: Tensor, loaded: Tensor) -> None:
        parameter.data.copy_(loaded.narrow(0, get_tensor_model_parallel_rank() * own, own))

    weight.weight_loader = load
    rotation.weight = weight


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


class CompleteWeights:
    """Mixin in front of a model of vLLM, which refuses a checkpoint that lacks a tensor; vLLM does not look.

    renamed: the stock names of the tensors that have NORM_PREFIX in the checkpoint, where the model has them.
    """

    packed_modules_mapping: dict[str, list[str]]

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        self.renamed: dict[str, str] = {}
        self.checkpoint: str = vllm_config.model_config.model
        quantization = vllm_config.quant_config
        self.held_config: Any = vllm_config.model_config.hf_config
        modules = pruned_modules(self.held_config)
        quantization.dense |= {name for name, linears in modules.items() if linears & quantization.dense}
        stock: Any = super()
        stock.__init__(vllm_config=vllm_config, prefix=prefix)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Loads the tensors of a checkpoint by vLLM's loaders, and returns the names of the parameters.

        Raises UserError if a tensor is missing, also a norm whose name does not say that its layer rotates,
        and if vLLM's model leaves one out, such as a bias.
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
        if left_out and get_pp_group().world_size == 1:  # of several, another rank may hold it
            raise UserError(
                f"vLLM's model does not read {counted(len(left_out), 'tensor')} of the checkpoint, the first "
                f"is {min(left_out)}: serve this checkpoint by `drot serve`"
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


class VllmDrotModel(CompleteWeights):
    """Mixin in front of a model of vLLM, whose decoder layers hold what the checkpoint says."""

    model: Any

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config, held = vllm_config.model_config.hf_config, vllm_config.quant_config.drot
        bases = held.bases(config.num_hidden_layers)
        for index, layer in enumerate(self.model.layers):
            if isinstance(layer, PPMissingLayer):  # of another pipeline-parallel rank
                continue
            name = f"model.layers.{index}."
            if bases.holds(index):
                add_boundary_rotation(layer, held.boundary, config.hidden_size)
                self._rename(name, "input_layernorm")
            if held.down_rotation is not None:
                add_down_rotation(layer.mlp, config.intermediate_size, held.down_rotation)
                self._rename(name, "post_attention_layernorm")

    def _rename(self, layer: str, norm: str) -> None:
        self.renamed[f"{layer}{NORM_PREFIX}{norm}.weight"] = f"{layer}{norm}.weight"


class DrotLlamaForCausalLM(VllmDrotModel, LlamaForCausalLM):
    pass


class DrotMistralForCausalLM(VllmDrotModel, MistralForCausalLM):
    pass


class DrotQwen2ForCausalLM(VllmDrotModel, Qwen2ForCausalLM):
    pass


class DrotQwen3ForCausalLM(VllmDrotModel, Qwen3ForCausalLM):
    pass


class DrotErnie4_5ForCausalLM(VllmDrotModel, Ernie4_5ForCausalLM):
    pass


class DrotPhi3ForCausalLM(VllmDrotModel, Phi3ForCausalLM):
    pass
