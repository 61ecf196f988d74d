"""Small random checkpoints on disk, with a tokenizer, for tests of what drot reads."""

import json
from pathlib import Path
from typing import Any

from small_models import save_small_model, small_model


def save_small(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """Writes a random model of `family` and a tokenizer whose tokens are single characters to `folder`."""
    return save_small_model(small_model(family, **changes), folder)


def change_json(file: Path, **entries: Any) -> None:
    """Replaces entries of a JSON object in a file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
