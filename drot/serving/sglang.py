"""The plugin by which SGLang serves drot's packed checkpoints whose layers hold no rotation.

SGLang calls `register` in each of its processes, before it reads a checkpoint. It learns the `quant_method`
drot (sglang_linear.py). The rest is SGLang's own: by `import drot`, transformers reads the config of the
family, whose architecture SGLang has.

Layers that hold a rotation are refused. drot/serving/vllm.py serves them.

This module is the entry point of the group `sglang.srt.plugins`, so it imports SGLang inside `register` only.
"""

from drot.checkpoint.quantization_config import QUANT_METHOD
from drot.serving.requirements import warn_of_engine

#: the version with which the tests have run
TESTED = "0.5.23"


def register() -> None:
    """Registers drot's quantisation with SGLang. A second call changes nothing.

    If SGLang lacks a part of the interface, one line is logged and nothing is registered. SGLang then serves
    other models as before, and refuses those of drot.
    """
    try:
        from sglang.srt.layers.quantization import QUANTIZATION_METHODS

        from drot.serving.sglang_linear import SglangQuantization
    except Exception as error:  # SGLang would log a traceback
        warn_of_engine("SGLang", TESTED, error)
        return
    QUANTIZATION_METHODS[QUANT_METHOD] = SglangQuantization
