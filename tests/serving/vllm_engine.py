"""vLLM's engine with its own attention: the greedy tokens of a few prompts at once, of each checkpoint.

Arguments: the file of results, `eager` or `compiled`, checkpoints.
"""

import os
import sys
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

#: of one token, of some, and of the same length
PROMPTS = [[*range(first, first + length)] for first, length in ((3, 1), (5, 5), (7, 14), (9, 30), (20, 30))]
NEW_TOKENS = 24


def answered(model, eager):
    """Each prompt, and its new tokens."""
    engine = LLM(
        model=model,
        dtype="float32",
        enforce_eager=eager,
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=len(PROMPTS),
        gpu_memory_utilization=0.2,
    )
    answers = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False),
    )
    return [(answer.prompt_token_ids, list(answer.outputs[0].token_ids)) for answer in answers]


def main(results, mode, *models):
    found = {}
    for model in models:
        try:
            found[Path(model).name] = answered(model, mode == "eager")
        except Exception as error:  # vLLM's own are of several classes
            found[Path(model).name] = str(error)
        cleanup_dist_env_and_memory()
    torch.save(found, results)


if __name__ == "__main__":
    main(*sys.argv[1:])
