"""Small random checkpoints on disk, with a tokenizer, for tests of what drot reads."""

import json
from pathlib import Path
from typing import Any

from small_models import COMMON, small_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def save_small(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """Writes a random model of `family` and a tokenizer whose tokens are single characters to `folder`."""
    small_model(family, **changes).save_pretrained(folder)
    vocabulary = {chr(32 + index): index for index in range(COMMON["vocab_size"] - 1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary | {"<unk>": COMMON["vocab_size"] - 1}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    return folder


def change_json(file: Path, **entries: Any) -> None:
    """Replaces entries of a JSON object in a file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
