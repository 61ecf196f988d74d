"""The models of drot's checkpoints in vLLM, of families that vllm_models.py lacks: those of transformers.

vLLM makes an empty model of transformers, and replaces its linears, norms and attention by its own. drot adds
the rotations in between, as `drot.load` does. So a decoder layer is drot's (drot/model/boundary.py).

A packed linear is one of the replaced linears. Q is one of them too, dense and whole on each rank. R3 keeps
the blocks for the columns that down_proj has on the rank. The experts of a mixture are drot's
(engine_experts.py).
"""

from typing import Any

from torch import Tensor
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.model_executor.models.utils import PPMissingLayer, maybe_prefix
from vllm.utils.torch_utils import LayerNameType, _encode_layer_name, _resolve_layer_name

from drot.core.errors import UserError
from drot.model.block_rotation import activation_of
from drot.model.families import family_of
from drot.model.linear import module_at
from drot.model.mixins import mix, unmix
from drot.model.one_op import GatedMLP
from drot.serving.engine_experts import expert_op
from drot.serving.engine_models import (
    expect_held,
    keep_in_fp32,
    keep_own_share,
    linears_besides,
    logits_scale,
    refuse_expert_parallelism,
)
from drot.serving.vllm_models import CheckedWeights

#: families whose model changes its embeddings, which on a later pipeline-parallel rank are hidden states
ONE_STAGE = (
    "afmoe", "gemma4_text", "gemma4_unified_text", "granite", "granite_swa", "granitemoe", "granitemoe_swa",
    "granitemoeshared", "hyperclovax", "opt",
)  # fmt: skip


#: Finds the experts in the model that computes, as a process may hold several. A text as the key would be a
#: constant of the graph, and vLLM would compile each layer anew.
vllm_experts = expert_op(
    "vllm", lambda key: get_forward_context().no_compile_layers[_resolve_layer_name(key)], LayerNameType
)


class MergedMLP(GatedMLP):
    """A GatedMLP whose calls of gate and up vLLM finds in its source, and replaces by one of both."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """x [..., d] -> what the stock forward returns."""
        gate = self.gate_proj(x)
        up = self.up_proj(x)
        output: Tensor = self.down_proj(self.down_rotation(gate, up, activation_of(self, self.family)))
        return output


def merge_gate_and_up(model: Any) -> None:
    """Lets vLLM compute gate and up by one product in MLPs that hold R3.

    It then divides the outputs of gate and up among the tensor-parallel ranks, also of an MLP that the plan
    of the model does not name. So the plan gets the inputs of down_proj.
    """
    plan = dict(model.tp_plan or {})
    for name, mlp in model.named_modules():
        if isinstance(mlp, GatedMLP) and mlp.parts == (("gate_proj", "up_proj"), "down_proj"):
            given = mlp.given
            unmix(mlp)
            mix(mlp, MergedMLP, **given)
            plan[f"{name}.down_proj"] = "rowwise"
    model.tp_plan = plan


class DrotTransformersForCausalLM(CheckedWeights, TransformersForCausalLM):
    """The model of a family in FAMILIES_OF_TRANSFORMERS."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        self.own_prefix = prefix  # vLLM does not keep it, and its __init__ calls recursive_replace
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        keep_in_fp32(self.model)
        if self.pp_group.is_last_rank:
            self.logits_processor.scale = logits_scale(self.config)  # vLLM reads `logit_scale` alone

    def pipeline_parallel(self) -> None:
        """Adds rotations and packed experts to the empty model, before vLLM replaces a part of it.

        Raises UserError for several pipeline-parallel ranks of a family in ONE_STAGE.
        """
        if self.pp_group.world_size > 1 and self.config.model_type in ONE_STAGE:
            raise UserError(
                f"drot's plugin for vLLM takes one pipeline-parallel rank for {self.config.model_type}, got "
                f"{self.pp_group.world_size}: use tensor parallelism"
            )
        quantization = self.vllm_config.quant_config
        self.stored_buffers = expect_held(self, quantization.drot)
        merge_gate_and_up(self.model)
        quantization.dense |= linears_besides(self.model, self.config)
        super().pipeline_parallel()

    def recursive_replace(self) -> None:
        """Lets vLLM replace the linears, and R3 and the experts keep what this rank has of them.

        Raises UserError if experts of another model in this process have the same name.
        """
        super().recursive_replace()
        experts = keep_own_share(
            module_at(self, family_of(self.config).layers),
            self.config,
            missing=PPMissingLayer,
            rank=get_tensor_model_parallel_rank(),
            ranks=get_tensor_model_parallel_world_size(),
            add=tensor_model_parallel_all_reduce,
            op=vllm_experts,
        )
        context = self.compilation_config.static_forward_context
        for name, each in experts.items():
            # a draft model of speculative decoding has a prefix, and shares the context with its target
            whole = maybe_prefix(self.own_prefix, name)
            if whole in context:
                raise UserError(f"two models in one vLLM process have layers named {whole}: load one of them")
            context[whole], each.key = each, _encode_layer_name(whole)


class DrotTransformersMoEForCausalLM(DrotTransformersForCausalLM):
    """The same of a family in MIXTURES, whose experts drot computes (engine_experts.py)."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        """Raises UserError for expert parallelism."""
        if vllm_config.parallel_config.enable_expert_parallel:
            refuse_expert_parallelism()
        super().__init__(vllm_config=vllm_config, prefix=prefix)
