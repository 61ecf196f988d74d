"""Models of transformers in SGLang, for the checkpoints of drot that SGLang's own models do not compute.

SGLang makes an empty model of transformers, and replaces its linears, norms and attention by its own. drot
adds the rotations in between, as `drot.load` does, and as it does in vLLM (vllm_transformers.py). q, k and v
are three products here, and gate and up are two.
"""

from collections.abc import Mapping
from typing import Any

from sglang.srt.layers.utils import PPMissingLayer
from sglang.srt.models.transformers import TransformersForCausalLM
from sglang.srt.runtime_context import get_parallel

from drot.checkpoint.quantization_config import expect_rotations
from drot.core.errors import UserError
from drot.model.families import family_of
from drot.model.linear import module_at
from drot.serving.engine_models import (
    CompleteWeights,
    keep_own_blocks_of,
    linears_besides,
    logits_scale,
    modules_left_dense,
)

#: styles of transformers' plans for tensor parallelism that SGLang knows by an older name
OLDER_STYLES = {"colwise_gather_output": "colwise_rep", "rowwise_split_input": "rowwise_rep"}


class DrotTransformersForCausalLM(CompleteWeights, TransformersForCausalLM):
    """A model of transformers with the rotations of a checkpoint."""

    engine = "SGLang"
    stages = 1
    packed_modules_mapping: Mapping[str, list[str]] = {}

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        self.held_config, self.checkpoint = config, config.name_or_path
        quant_config.stacked = {}
        quant_config.dense |= modules_left_dense(config, quant_config.dense)
        super().__init__(config, quant_config=quant_config, prefix=prefix)
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
        expect_rotations(self, self.quant_config.drot)
        self.quant_config.dense |= linears_besides(self.model, self.config)
        super().pipeline_parallel()

    def _get_model_tp_plan(self) -> dict[str, str]:
        plan = super()._get_model_tp_plan()
        return {name: OLDER_STYLES.get(style, style) for name, style in plan.items()}

    def recursive_replace(self) -> None:
        """Lets SGLang replace the linears, and R3 keep the blocks for this rank's columns of down_proj."""
        super().recursive_replace()
        ranks = get_parallel()
        keep_own_blocks_of(
            module_at(self, family_of(self.config).layers),
            self.config,
            missing=PPMissingLayer,
            rank=ranks.tp_rank,
            ranks=ranks.tp_size,
        )
