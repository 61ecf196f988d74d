"""How the next token of each request in a batch is drawn: each request has its own temperature, k and p."""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

#: The settings of a GenerationConfig that a request of a batch may have. A request with another setting that
#: differs from its default, such as a penalty or a stop string, is generated alone.
BATCHED_SETTINGS = {
    *("do_sample", "temperature", "top_k", "top_p", "max_new_tokens", "max_length"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
    *("use_cache", "output_attentions", "output_hidden_states", "return_dict_in_generate"),
    *("transformers_version", "_from_model_config"),
}
#: settings that have no effect at these values, which old files name
NEUTRAL = {
    **{"repetition_penalty": 1.0, "typical_p": 1.0, "length_penalty": 1.0, "min_length": 0},
    **{"num_beams": 1, "num_return_sequences": 1, "no_repeat_ngram_size": 0},
}
#: top_k of transformers' `generate` where a config has none
DEFAULT_TOP_K = 50


def beyond_a_batch(config: GenerationConfig) -> dict[str, Any]:
    """The settings with which a batch cannot hold a request."""
    return {
        name: value
        for name, value in config.to_diff_dict().items()
        if name not in BATCHED_SETTINGS and not (name in NEUTRAL and value == NEUTRAL[name])
    }


def sampling_of(config: GenerationConfig, vocabulary: int) -> dict[str, Any]:
    """Temperature, top_k and top_p of a request, as `Sampling` takes them. Temperature 0 is greedy.

    vocabulary: the number of tokens, which is top_k where `config` switches it off with 0.
    """
    if not config.do_sample or config.temperature == 0:
        return {"temperature": 0.0, "top_k": 1, "top_p": 1.0}
    given = {"temperature": config.temperature, "top_p": config.top_p}
    top_k = DEFAULT_TOP_K if config.top_k is None else config.top_k
    return {
        **{name: 1.0 if value is None else float(value) for name, value in given.items()},
        "top_k": min(top_k or vocabulary, vocabulary),
    }


class Sampling(ContinuousBatchingLogitsProcessorList):
    """The logits processors of a batch. Each request has its own settings, of `sampling_of`.

    transformers' own processors have settings for each request as well, but its batch is greedy as a whole or
    not at all, and it has no processor for a setting that the first request does not have.
    """

    def __init__(self) -> None:
        warpers = [TemperatureLogitsWarper(1.0), TopKLogitsWarper(1), TopPLogitsWarper(1.0)]
        super().__init__(LogitsProcessorList(warpers), per_request_processors=True)

    def __call__(self, input_ids: Tensor, scores: Tensor, logits_processor_args: Tensor) -> Tensor:
        """scores [tokens, vocabulary] -> the same, with -inf for the tokens that are not to be drawn.

        logits_processor_args: int32 [3, at least tokens], the bits of temperature, top_k and of top_p.
        """
        greedy = logits_processor_args[0, : scores.shape[0]].view(torch.float32) == 0
        best = scores.argmax(-1, keepdim=True)
        only_best = torch.full_like(scores, -torch.inf).scatter_(-1, best, 0.0)
        # a GPU would have to wait for the answer, and could not capture a graph
        if scores.device.type == "cpu" and bool(greedy.all()):
            return only_best
        ids: Any = input_ids
        drawn: Tensor = super().__call__(ids, scores, logits_processor_args)
        return torch.where(greedy[:, None], only_best, drawn)
