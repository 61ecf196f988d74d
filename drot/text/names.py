"""The names of texts: which source is a dataset on the hub, which a local file, and which the model's own.

Nothing here imports torch, so that the command line finds a wrong name at once.
"""

import os
import re
from pathlib import Path
from typing import Any

from drot.core.checks import shortened
from drot.core.errors import UserError
from drot.text.mixture import texts_of

SUFFIXES = (".txt", ".json", ".jsonl", ".parquet")
#: Source on the hub with a short name → arguments of datasets.load_dataset. A streamed dataset is read row by
#: row, and only as far as it is needed.
HUB: dict[str, dict[str, Any]] = {
    "c4": {"path": "allenai/c4", "data_files": "en/c4-train.00000-of-01024.json.gz", "streaming": True},
    "wikitext2": {"path": "Salesforce/wikitext", "name": "wikitext-2-raw-v1", "streaming": False},
}
#: any dataset on the hub: org/name, org/name:split or org/name:config:split
DATASET = re.compile(r"(?P<path>\w[\w.-]*/[\w.-]+)((:(?P<name>[\w.-]+))?:(?P<split>[\w.-]+))?")
#: Split → the sources on the hub that have it. `train` is for calibration, `test` for evaluation.
SPLITS = {"train": ("c4", "wikitext2"), "test": ("wikitext2",)}
#: the source that is a text of the model itself, which the caller has in a file (drot/pipeline/own_text.py)
OWN_SOURCE = "own"
#: Split → the argument by which a caller names its source, for error messages.
ARGUMENT = {"train": "source", "test": "ppl"}


def check_sources(source: str) -> None:
    """Raises UserError if one of the texts of a calibration is a file that does not exist. Reads nothing."""
    for text, _ in texts_of(source):
        if text != OWN_SOURCE:
            local_file(text, "train")


def are_files(source: str) -> bool:
    """Whether all texts of a calibration are local files."""
    return all(text != OWN_SOURCE and hub_arguments(text, "train") is None for text, _ in texts_of(source))


def hub_arguments(source: str, split: str) -> dict[str, Any] | None:
    """The arguments of datasets.load_dataset for `source`; None if `source` is no dataset on the hub."""
    if source in SPLITS[split]:  # ./c4 names a file or a folder c4
        return HUB[source] | {"split": split}
    found = DATASET.fullmatch(source)
    if found is None or os.path.exists(source) or Path(source).suffix in SUFFIXES:
        return None
    return {"path": found["path"], "name": found["name"], "split": found["split"] or split, "streaming": True}


def local_file(source: str, split: str) -> Path | None:
    """The file of a source; None for a dataset on the hub. Reads nothing.

    Raises UserError if `source` is neither.
    """
    if hub_arguments(source, split) is not None:
        return None
    path = Path(source)
    if not os.path.isfile(path):
        raise UserError(
            f"`{ARGUMENT[split]}` must be {', '.join(SPLITS[split])}, a dataset on the hub such as "
            f"org/name:split, or a {', '.join(SUFFIXES)} file; got {shortened(source)}, which "
            + ("is a folder" if os.path.exists(path) else "is no such name and no file")
        )
    if path.suffix not in SUFFIXES:
        raise UserError(
            f"{source}: the file's suffix must be one of {', '.join(SUFFIXES)}; got {path.suffix!r}"
        )
    return path
