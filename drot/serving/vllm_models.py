"""The models of drot's checkpoints in vLLM: vLLM's own, with the rotations that a checkpoint holds.

Families of which vLLM has no such model are in drot/serving/vllm_transformers.py.

vLLM's decoder layers return the MLP's output and the residual r before they are added. So `residual` is the
stock forward followed by r ← r Q, and `input` is h ← h Q followed by the stock forward.
"""

from typing import Any

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

from drot.config import BoundaryPlace
from drot.core.errors import UserError
from drot.model.block_rotation import DOWN_ROTATION, BlockRotation
from drot.model.boundary import NORM_PREFIX, ROTATION_MODULE
from drot.model.mixins import mix
from drot.serving.engine_models import CompleteWeights, modules_left_dense, unpruned_linears
from drot.serving.shares import keep_own_blocks

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
        output, residual = stock.forward(
            positions=positions, hidden_states=hidden_states, residual=residual, **kwargs
        )
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
    keep_own_blocks(rotation, get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())
    setattr(mlp, DOWN_ROTATION, rotation)
    mix(mlp, VllmRotatedMLP)


class CheckedWeights(CompleteWeights):
    """CompleteWeights in vLLM."""

    engine = "vLLM"

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        self.renamed: dict[str, str] = {}
        self.checkpoint: str = vllm_config.model_config.model
        self.stages = get_pp_group().world_size
        quantization = vllm_config.quant_config
        self.held_config: Any = vllm_config.model_config.hf_config
        quantization.dense |= modules_left_dense(self.held_config, quantization.dense)
        stock: Any = super()
        stock.__init__(vllm_config=vllm_config, prefix=prefix)


class VllmDrotModel(CheckedWeights):
    """Mixin in front of a model of vLLM, whose decoder layers hold what the checkpoint says."""

    model: Any

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        vllm_config.quant_config.dense |= unpruned_linears(vllm_config.model_config.hf_config)
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
