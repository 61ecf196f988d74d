"""A calibration text that the model itself writes: it is of all kinds that the model knows."""

import gc
import json
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.filesize import decimal as size_text
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from drot.checkpoint.load import load, load_tokenizer
from drot.checkpoint.manifest import MANIFEST
from drot.checkpoint.resume import IDENTITY
from drot.config import ResolvedRecipe
from drot.core.checks import is_a, is_callable
from drot.core.errors import UserError
from drot.core.events import Progress, ProgressEvent, silent
from drot.core.files import check_writable, new_file, writing
from drot.core.hashes import json_digest
from drot.machine.devices import computing_dtype, free_memory, is_gpu, parse_dtype, total_memory
from drot.machine.memory import available_memory, return_free_memory
from drot.model.sizes import check_seqlen, head_shape, positions_of
from drot.pipeline.sizes import without_weights
from drot.text.files import SAMPLED, WRITTEN_BY, author
from drot.text.names import OWN_SOURCE
from drot.text.source import tokens_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from drot.pipeline.tokens import TextReader

logger = logging.getLogger("drot")
#: sequences that are written at once, on a CPU, and at most on a GPU
BATCH, GPU_BATCH = 32, 512
#: share of a GPU's memory beside the weights that their keys, values and probabilities may take
CACHE_SHARE = 0.5
SUFFIX = ".jsonl"
#: tokens of a sequence that is written
SEQLEN = 512
#: Tokens that are written for each that a run reads: what is tokenised again has others, mostly fewer.
WRITTEN = 1.1


def sample(
    model: str | Path,
    out: str | Path,
    *,
    tokens: int = 262144,
    seqlen: int = SEQLEN,
    seed: int = 0,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    progress: Progress = silent,
) -> int:
    """Lets `model` write a text, which `drot.prune` takes as `calibration`, and returns its sequences.

    Each sequence is a row {"text": ...} of the file `out`. It begins with a token drawn from the whole
    vocabulary, so that it may become code, a table, a dialogue or another language, and every further token
    is drawn by its probability, as in LLM-QAT (Liu et al. 2023, arXiv 2305.17888). The same seed gives the
    same text on the same machine. The first row says too that a model wrote the text: `drot.prune` cuts it
    into sequences that follow each other, whatever the seed of its calibration.

    Raises UserError for a number below 1 (`seqlen`: below 2), a seed below 0 or of more than 64 bits, a model
    without a tokenizer, a model that gives no probabilities, and a file `out` that exists or does not end in
    .jsonl.

    tokens: the length of the text; rounded up to whole sequences.
    seqlen: tokens of a sequence, at most those that the model reads.
    progress: receives the event `sample` after each token of a batch of sequences.
    """
    is_a("out", out, str, Path)
    is_callable("progress", progress)
    is_a("seed", seed, int)
    out = Path(out)
    for name, value, least in (("tokens", tokens, 1), ("seqlen", seqlen, 2)):
        is_a(name, value, int)
        if value < least:
            raise UserError(f"`{name}` must be at least {least}, got {value}")
    if not 0 <= seed < 2**64:
        raise UserError(f"`seed` must be a whole number from 0 to {2**64 - 1}; got {seed}")
    if out.suffix != SUFFIX:
        raise UserError(f"`out` must end in {SUFFIX}, got {out}: its rows hold a text each")
    if os.path.exists(out):
        raise UserError(f"{out} exists: name another `out` or remove it")
    check_writable(out)
    tokenizer = load_tokenizer(model)
    progress(ProgressEvent(phase="load"))
    loaded = load(model, device=device, dtype=dtype)
    check_seqlen(seqlen, loaded.config)
    return _write(loaded, tokenizer, out, -(-tokens // seqlen), seqlen, seed, progress, SAMPLED)


def write_own_text(file: Path, recipe: ResolvedRecipe, reader: "TextReader") -> None:
    """Writes the text that a run reads for the source `own`, unless `file` holds it or the run reads none.

    The text has WRITTEN times the tokens that the run reads, also for the training of all layers together;
    its seed is that of the calibration. A model that is named is loaded for it, and dropped. The first row
    has a digest of what wrote the text: until a run has a journal, another run could have left its `file`.

    Raises UserError if the memory does not hold the model, if a run that has begun has no text, and as
    `sample`.

    reader: has the model; its device and its dtype are those of a model that is named. A loaded model writes
        where it lies.
    """
    model, config, device, dtype = reader.model, reader.config, reader.device, reader.dtype
    text = recipe.calibration
    counts = (text.nsamples, recipe.recovery.distill_nsamples)
    tokens = math.ceil(WRITTEN * sum(tokens_of(OWN_SOURCE, text, count) for count in counts))
    if not tokens:
        return
    seqlen = min(SEQLEN, positions_of(config) or SEQLEN)
    count = -(-tokens // seqlen)
    name = str(model) if isinstance(model, str | Path) else config.name_or_path
    settings = json.loads(config.to_json_string(use_diff=False))
    written_by = json_digest([name, settings, str(dtype), text.seed, count, seqlen])
    begun = any((file.parent / journal).exists() for journal in (IDENTITY, MANIFEST))
    if begun and not file.exists():
        raise UserError(
            f"cannot resume {file.parent}: it has no {file.name}, so its run read another text or the file "
            "was removed: name the `source` of that run, or copy the file back"
        )
    if file.exists():
        # the texts of a sweep have names of their own
        if begun or file.parent.suffix != ".partial" or author(file) == written_by:
            return
        logger.warning("%s is a text of another model or of other settings: it is written again", file)
        file.unlink()
    if loads := isinstance(model, str | Path):
        reader.progress(ProgressEvent(phase="load"))
        dtype = computing_dtype(dtype, device)
        _check_memory(config, device, dtype)
        model = load(model, device=device, dtype=dtype)
    made = not file.parent.exists()
    with writing(file):
        file.parent.mkdir(exist_ok=True)
    try:
        _write(model.eval(), reader.tokenizer, file, count, seqlen, text.seed, reader.progress, written_by)
    except torch.OutOfMemoryError:
        raise _too_little_memory(device, "") from None
    finally:
        if made and not file.exists():
            file.parent.rmdir()
    if loads:
        del model
        gc.collect()
        if is_gpu(device):
            torch.get_device_module(device).empty_cache()
        return_free_memory()


def _check_memory(config: Any, device: torch.device, dtype: str | torch.dtype) -> None:
    chosen = config.dtype or torch.float32 if dtype == "auto" else parse_dtype(dtype)
    count = sum(parameter.numel() for parameter in without_weights(config).parameters())
    needed, free = count * chosen.itemsize, free_memory(device) if is_gpu(device) else available_memory()
    if needed > free:
        raise _too_little_memory(device, f", {size_text(needed)}, and {size_text(free)} are free")


def _too_little_memory(device: torch.device, sizes: str) -> UserError:
    where = f"the memory of {device}" if is_gpu(device) else "main memory"
    return UserError(
        f"`source` own needs the whole model in {where}{sizes}: leave own out, or let "
        "`drot sample` write the text on a larger machine and name its file"
    )


def _write(
    model: "PreTrainedModel",
    tokenizer: Any,
    out: Path,
    count: int,
    seqlen: int,
    seed: int,
    progress: Progress,
    written_by: str,
) -> int:
    """Lets the model write `count` sequences to the file `out`, and returns `count`.

    written_by: stands in the first row too.
    """
    more = {WRITTEN_BY: written_by}
    with new_file(out) as part, part.open("w", encoding="utf-8") as file:
        for ids in _batches(model, tokenizer, count, seqlen, seed, progress):
            for text in tokenizer.batch_decode(ids, skip_special_tokens=True):
                file.write(json.dumps({"text": text, **more}, ensure_ascii=False) + "\n")
                more = {}
    return count


class Told(StoppingCriteria):
    """Stops nothing, but tells `progress` of the tokens that are written: transformers asks it after each.

    before: tokens of the batches before. steps: tokens of the whole text.
    """

    def __init__(self, before: int, steps: int, progress: Progress) -> None:
        self._before, self._steps, self._progress = before, steps, progress

    def __call__(self, input_ids: Any, scores: Any, **others: Any) -> Any:
        step = self._before + input_ids.numel()
        self._progress(ProgressEvent(phase="sample", step=step, steps=self._steps))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _batch(model: "PreTrainedModel", seqlen: int) -> int:
    """How many sequences are written at once: a power of two.

    Of a GPU it follows from the memory that there is, not from what is free, so that the same GPU writes the
    same text.
    """
    if not is_gpu(model.device):
        return BATCH
    config = model.config.get_text_config()
    heads = [head_shape(config, index) for index in range(config.num_hidden_layers)]
    cache = 2 * sum(each.kv_heads * each.head_dim for each in heads) * model.dtype.itemsize * seqlen
    probabilities = 4 * 4 * config.vocab_size  # of one token: logits, sorted or not, in fp32
    room = total_memory(model.device) - sum(parameter.nbytes for parameter in model.parameters())
    most = int(max(1, CACHE_SHARE * room // (cache + probabilities)))
    return int(min(GPU_BATCH, 2 ** (most.bit_length() - 1)))


def _batches(
    model: "PreTrainedModel", tokenizer: Any, count: int, seqlen: int, seed: int, progress: Progress = silent
) -> Iterator[torch.Tensor]:
    """Token ids [sequences, seqlen] of `count` sequences in all, as many at once as the device takes well."""
    special = set(tokenizer.all_special_ids)
    # some tokenizers have more tokens than the model
    embedding: Any = model.get_input_embeddings()
    known = min(len(tokenizer), len(embedding.weight))
    first = torch.tensor([token for token in range(known) if token not in special])
    its_own = model.generation_config
    # what is not named here would come from generation_config.json of the model, which narrows the text
    drawn = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=seqlen - 1, pad_token_id=0
    )
    devices, batch = [model.device] if is_gpu(model.device) else [], _batch(model, seqlen)
    with torch.random.fork_rng(devices, device_type=model.device.type), torch.inference_mode():
        torch.manual_seed(seed)
        for start in range(0, count, batch):
            begun = first[torch.randint(len(first), (min(batch, count - start), 1))].to(model.device)
            generate: Any = model.generate
            model.generation_config = drawn
            told = StoppingCriteriaList([Told(start * seqlen, count * seqlen, progress)])
            try:
                ids = generate(begun, attention_mask=torch.ones_like(begun), stopping_criteria=told)
            except RuntimeError as error:
                # a GPU names no cause
                if not any(words in str(error) for words in ("probability tensor", "device-side assert")):
                    raise
                raise UserError(
                    "the model gives inf or nan in place of probabilities: use `dtype` float32, or copy the "
                    "model again"
                ) from error
            finally:
                model.generation_config = its_own
            yield ids.cpu()
