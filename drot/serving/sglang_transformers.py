"""Models of transformers in SGLang, for the checkpoints of drot that SGLang's own models do not compute.

SGLang makes an empty model of transformers, and replaces its linears, norms and attention by its own. drot
adds the rotations in between, as `drot.load` does, and as it does in vLLM (vllm_transformers.py). q, k and v
are three products here, and gate and up are two.
"""

import itertools
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from sglang.srt.distributed import tensor_model_parallel_all_reduce
from sglang.srt.layers.utils import PPMissingLayer
from sglang.srt.models.transformers import TransformersForCausalLM
from sglang.srt.runtime_context import get_exec, get_parallel

from drot.core.errors import UserError
from drot.machine.devices import is_gpu
from drot.model.families import family_of
from drot.model.family import renamed
from drot.model.linear import module_at
from drot.model.sizes import experts_of
from drot.serving.engine_experts import RankExperts, expert_op
from drot.serving.engine_models import (
    CompleteWeights,
    expect_held,
    graphs_hold_experts,
    keep_in_fp32,
    keep_own_share,
    linears_besides,
    logits_scale,
    modules_left_dense,
    refuse_expert_parallelism,
)

#: styles of transformers' plans for tensor parallelism that SGLang knows by an older name
OLDER_STYLES = {"colwise_gather_output": "colwise_rep", "rowwise_split_input": "rowwise_rep"}
#: the experts by their keys
EXPERTS: WeakValueDictionary[str, RankExperts] = WeakValueDictionary()
NUMBERS = itertools.count()
sglang_experts = expert_op("sglang", EXPERTS.__getitem__)


def refuse_graphs(graphs: Any, config: Any, dtype: torch.dtype) -> None:
    """Raises UserError if SGLang makes CUDA graphs, and they cannot hold the experts of a mixture.

    graphs: SGLang's CudaGraphConfig; None if it makes none.
    """
    phases = () if graphs is None else (graphs.decode, graphs.prefill)
    makes_graphs = any(phase.backend != "disabled" for phase in phases)
    if makes_graphs and not graphs_hold_experts(config, dtype):
        raise UserError(
            "drot's plugin for SGLang computes this mixture without CUDA graphs, which hold only packed "
            "experts in 16 bits, with no R3 or with R3 after SiLU: start SGLang with its option "
            "disable-cuda-graph"
        )


class DrotTransformersForCausalLM(CompleteWeights, TransformersForCausalLM):
    """A model of transformers with the rotations of a checkpoint."""

    engine = "SGLang"
    stages = 1
    packed_modules_mapping: Mapping[str, list[str]] = {}

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        self.held_config, self.checkpoint = config, config.name_or_path
        quant_config.stacked = {}
        if experts_of(config):
            if is_gpu(torch.get_default_device()):
                refuse_graphs(get_exec().graph.cuda_graph_config, config, torch.get_default_dtype())
            if get_parallel().moe_ep_size > 1:
                refuse_expert_parallelism()
        quant_config.dense |= modules_left_dense(config, quant_config.dense)
        super().__init__(config, quant_config=quant_config, prefix=prefix)
        keep_in_fp32(self.model)
        self.logits_processor.logit_scale = logits_scale(config)  # SGLang reads `logit_scale` alone

    def pipeline_parallel(self) -> None:
        """Adds the rotations to the empty model of transformers, before SGLang replaces a part of it.

        Raises UserError for several pipeline-parallel ranks.
        """
        if self.pp_group.world_size > 1:
            raise UserError(
                f"drot's plugin for SGLang takes one pipeline-parallel rank, got {self.pp_group.world_size}: "
                "use tensor parallelism"
            )
        self.stored_buffers = expect_held(self, self.quant_config.drot)
        self.quant_config.dense |= linears_besides(self.model, self.config)
        super().pipeline_parallel()

    def _in_model(self, name: str) -> str:
        """The name in transformers' model, of which SGLang does not know the renames."""
        return self._with_layer(
            name, lambda family, stored: renamed(stored, ((file, own) for own, file in family.files))
        )

    def _get_model_tp_plan(self) -> dict[str, str]:
        plan = super()._get_model_tp_plan()
        return {name: OLDER_STYLES.get(style, style) for name, style in plan.items()}

    def recursive_replace(self) -> None:
        """Lets SGLang replace the linears, and R3 and the experts keep what this rank has of them."""
        super().recursive_replace()
        ranks = get_parallel()
        experts = keep_own_share(
            module_at(self, family_of(self.config).layers),
            self.config,
            missing=PPMissingLayer,
            rank=ranks.tp_rank,
            ranks=ranks.tp_size,
            add=tensor_model_parallel_all_reduce,
            op=sglang_experts,
        )
        for each in experts.values():
            each.key = f"{each.name} {next(NUMBERS)}"  # a process may hold several models
            EXPERTS[each.key] = each
