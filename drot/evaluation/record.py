"""The evaluations of a checkpoint in its manifest, drot.json."""

import contextlib
import datetime
import logging
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python
from torch import Tensor

from drot.checkpoint.card import CARD, save_card
from drot.checkpoint.manifest import MANIFEST, CheckpointManifest, update_manifest
from drot.checkpoint.records import EvaluationRecord
from drot.core.errors import UserError
from drot.core.files import new_file
from drot.evaluation.choices import OWN_TASK, task_names
from drot.machine.environment import versions
from drot.text.names import SPLITS
from drot.text.source import calibration_hash

logger = logging.getLogger("drot")


def text_record(source: str, tokens: Tensor, seqlen: int) -> dict[str, Any]:
    """What an evaluation says of a text with the token ids `tokens` [n]."""
    return {
        "split": "test" if source in SPLITS["test"] else None,
        "tokens": len(tokens),
        "windows": len(tokens) // seqlen,
        "sha256": calibration_hash(tokens),
    }


def record(folder: str, figures: dict[str, Any]) -> None:
    """Adds `figures`, the result of `evaluate` for one model, to the manifest and the card in `folder`.

    The entry has the date, the versions and the figures without the model's name. Infinity and NaN become
    null. An earlier entry of the same measurement (`_measurement`) is replaced; its baselines stay.

    A folder without a manifest, a hub name, and a folder that cannot be written are left as they are, and a
    warning says so.
    """
    if not (Path(folder) / MANIFEST).exists():
        why = f"it has no {MANIFEST}" if Path(folder).exists() else "it is on the hub"
        logger.warning("the figures of %s are not recorded, because %s", folder, why)
        return
    of_lm_eval = figures["tasks"].keys() - task_names([OWN_TASK], figures["texts"])
    packages = {"lm_eval": metadata.version("lm_eval")} if of_lm_eval else {}
    entry = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions() | packages,
        **{key: value for key, value in figures.items() if key != "model"},
    }
    new = EvaluationRecord.model_validate(to_jsonable_python(entry, inf_nan_mode="null"))

    card = Path(folder) / CARD
    before: list[bytes] = []

    def add(manifest: CheckpointManifest) -> None:
        same = [old for old in manifest.evaluations if _measurement(old) == _measurement(new)]
        new.baselines = new.baselines or next((old.baselines for old in same if old.baselines), None)
        kept = [old for old in manifest.evaluations if _measurement(old) != _measurement(new)]
        manifest.evaluations = [*kept, new]
        if card.exists():
            before.append(card.read_bytes())
        save_card(Path(folder), manifest)

    try:
        update_manifest(folder, add, [CARD])
    except (OSError, UserError) as error:
        logger.warning("the figures of %s are not recorded: %s", folder, error)
        if before:  # the card is written, and the manifest is not
            with contextlib.suppress(OSError), new_file(card) as file:
                file.write_bytes(before[0])


def _measurement(entry: EvaluationRecord) -> Any:
    """What was measured: two entries with equal measurements differ by machine, versions or chance only."""
    texts = {name: text.sha256 for name, text in entry.texts.items()}
    tasks = sorted((task, details.fewshot) for task, details in entry.task_details.items())
    return [entry.seqlen, entry.dtype, entry.against, texts, sorted(entry.tasks), tasks]
