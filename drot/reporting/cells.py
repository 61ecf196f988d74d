"""The runs of the cells of a sweep, and what all cells share."""

import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drot.checkpoint.dtypes import cast_weights
from drot.checkpoint.load import load, load_tokenizer
from drot.checkpoint.opening import load_config
from drot.checkpoint.resume import OWN_TEXT, read_journal
from drot.config import CalibrationConfig, ResolvedRecipe, default_seqlen
from drot.config.settings import values_of
from drot.core.errors import BrokenModelError, UserError
from drot.core.events import Progress, ProgressEvent
from drot.core.files import write_json, writing
from drot.core.hashes import json_digest, weights_record, with_digest
from drot.evaluation import choices
from drot.evaluation.perplexity import check_logits, load_eval_tokens, perplexities
from drot.evaluation.predictions import check_windows, predict
from drot.evaluation.tasks import load_tasks, run_tasks
from drot.machine.devices import computing_dtype, dtype_name
from drot.machine.environment import machine_name, versions
from drot.model.sizes import positions_of
from drot.pipeline.own_text import write_own_text
from drot.pipeline.prune import prune
from drot.pipeline.tokens import trainable
from drot.pipeline.validation import check_seqlen
from drot.reporting.grid import Cell, Grid, effective
from drot.reporting.rows import run_columns
from drot.text.further import load_further
from drot.text.source import calibration_hash, check_sources, load_calibration

logger = logging.getLogger("drot")

#: what a sweep keeps in its folder: the figures of the dense model and of cells
DENSE, CELLS = "dense.json", "cells"
#: digits of the SHA-256 that names a cell
KEY_DIGITS = 16

#: `perplexity`: text → perplexity; `accuracy`: task → accuracy in [0, 1]; None if it is not finite
Measured = dict[str, dict[str, float | None]]


class CellRunner:
    """Prunes and measures the cells of one sweep.

    It reads the texts, the tasks and the calibration tokens of all cells, and measures the dense model unless
    an earlier call with the same folder did.
    """

    def __init__(
        self,
        model: str,
        out: Path,
        grid: Grid,
        cells: Sequence[Cell],
        *,
        device: torch.device,
        dtype: str,
        progress: Progress,
    ) -> None:
        self.model, self.out = model, out
        self.device, self.progress = device, progress
        self.dtype = str(computing_dtype(dtype, device))
        self.tokenizer, self.config = load_tokenizer(model), load_config(model)
        self.seqlen = (
            default_seqlen(positions_of(self.config)) if grid.asked.seqlen is None else grid.asked.seqlen
        )
        self.texts: dict[str, Tensor] = {}
        for source in grid.asked.texts:
            tokens = load_eval_tokens(source, self.tokenizer, grid.asked.text_column, progress)
            check_windows(tokens, self.config.get_text_config(), self.seqlen)
            self.texts[source] = tokens
        of_lm_eval = [task for task in grid.asked.tasks if task != choices.OWN]
        self.tasks = load_tasks(of_lm_eval) if of_lm_eval else None
        self.own_tasks = choices.task_names(grid.asked.tasks, self.texts)
        #: the calibration tokens of a text, and those of the training of all layers by their number
        self.calibration: dict[CalibrationConfig, Tensor] = {}
        self.distillation: dict[tuple[CalibrationConfig, int], Tensor] = {}
        self.own_text: dict[CalibrationConfig, Path] = {}
        recipes = [cell.resolved for cell in cells if cell.resolved.reads_calibration]
        for recipe in sorted(recipes, key=lambda recipe: -recipe.recovery.distill_nsamples):
            self._read_calibration(recipe)
        #: what the figures of every cell depend on besides its recipe
        self.identity: dict[str, Any] = {}
        self.dense = self._measure_dense()

    def _read_calibration(self, recipe: ResolvedRecipe) -> None:
        """Reads the tokens of a recipe, unless they are those of another one.

        The first recipe with a calibration that the model writes must be the one that reads most of it.
        """
        text, further = recipe.calibration, recipe.recovery.distill_nsamples
        if text not in self.calibration:
            key = json_digest([values_of(text), further])[:KEY_DIGITS]
            self.own_text[text] = self.out / f"{Path(OWN_TEXT).stem}_{key}.jsonl"
            check_seqlen(text.seqlen, self.config)
            check_sources(text.source)
            write_own_text(
                self.own_text[text], recipe=recipe, model=self.model, tokenizer=self.tokenizer,
                config=self.config, device=self.device, dtype=self.dtype, progress=self.progress,
            )  # fmt: skip
            self.calibration[text] = load_calibration(
                text, self.tokenizer, self.progress, own=self.own_text[text]
            )
        if further and (text, further) not in self.distillation:
            tokens = self.calibration[text]
            self.distillation[text, further] = load_further(
                text, further, tokens, self.tokenizer, self.progress, self.own_text[text]
            )

    def _measure_dense(self) -> Any:
        """The figures of the dense model as in `_measure`, none of which is None."""
        self.progress(ProgressEvent(phase="load"))
        model = load(self.model, device="cpu", dtype=self.dtype)
        self.identity = {
            "weights": weights_record(model.state_dict()),
            "dtype": dtype_name(model.dtype),
            "seqlen": self.seqlen,
            "texts": {source: calibration_hash(tokens) for source, tokens in self.texts.items()},
        }
        if names := self._task_names():
            self.identity["tasks"] = names
        before = read_journal(self.out / DENSE)
        if before is not None and before["identity"] == self.identity:
            return before
        measured = {"identity": self.identity, **self._measure(model, may_be_broken=False)}
        with writing(self.out):
            (self.out / CELLS).mkdir(parents=True, exist_ok=True)
        write_json(self.out / DENSE, with_digest(measured))
        return measured

    def key(self, cell: Cell) -> str:
        """The name of a cell: a hash of all that its figures depend on."""
        settings = effective(cell.resolved) | {"calibration": self._calibration_hash(cell.resolved)}
        return json_digest([settings, self.identity])[:KEY_DIGITS]

    def run(self, cell: Cell, key: str) -> dict[str, Any]:
        """Prunes and measures the cell of the name `key`; writes its record and returns it."""
        recipe, resolved, text = cell.recipe, cell.resolved, cell.resolved.calibration
        wanted = resolved.recovery.distill_nsamples
        further = self.distillation.get((text, wanted))
        if further is not None and not trainable(len(further), wanted):
            recipe, further = recipe.replace(distill_epochs=0), None
            recovery = dataclasses.replace(resolved.recovery, distill_epochs=0, distill_nsamples=0)
            resolved = dataclasses.replace(resolved, recovery=recovery)
        result = prune(
            self.model,
            recipe,
            tokenizer=self.tokenizer,
            device=self.device,
            dtype=self.dtype,
            progress=self.progress,
            calibration=self.calibration.get(text),
            distillation=further,
        )
        if self.dtype != "auto":  # the result has the dtype of the checkpoint
            cast_weights(result.model, getattr(torch, self.dtype))
        record = {
            "recipe": resolved.to_dict(),
            "identity": self.identity,
            "calibration": self._calibration_hash(cell.resolved),
            **self._measure(result.model, may_be_broken=True),
            **run_columns(result.manifest),
            "machine": machine_name(self.device),
            "versions": versions(),
        }
        plain: dict[str, Any] = json.loads(json.dumps(record))
        write_json(self.out / CELLS / f"{key}.json", with_digest(plain))
        return plain

    def _calibration_hash(self, recipe: ResolvedRecipe) -> str | None:
        tokens = self.calibration.get(recipe.calibration) if recipe.reads_calibration else None
        return None if tokens is None else calibration_hash(tokens)

    def _task_names(self) -> list[str]:
        return [*self.own_tasks, *(self.tasks.tasks if self.tasks else ())]

    def _measure(self, model: PreTrainedModel, *, may_be_broken: bool) -> Measured:
        """The figures of a model. A model without a finite loss is an error unless it `may_be_broken`."""
        perplexity: dict[str, float | None] = dict.fromkeys(self.texts)
        accuracy: dict[str, float | None] = dict.fromkeys(self._task_names())
        try:
            perplexity |= perplexities(
                model,
                self.texts,
                seqlen=self.seqlen,
                device=self.device,
                name=self.model,
                progress=self.progress,
            )
            if self.own_tasks:
                streamed = None if model.device == self.device else self.device
                scores = choices.scores(
                    self.texts, lambda tokens, length: predict(model, tokens, length, streamed)
                )
                accuracy |= {name: score.accuracy for name, score in scores.items()}
            if self.tasks is not None:
                if model.device != self.device:
                    raise UserError(f"tasks need the whole of {self.model} on {self.device}: it does not fit")
                check_logits(model)
                scores = run_tasks(model, self.tokenizer, self.tasks)
                accuracy |= {name: score.accuracy for name, score in scores.items()}
        except BrokenModelError as error:
            if not may_be_broken:
                raise
            logger.warning("a cell has no figures: %s", error)
        return {"perplexity": perplexity, "accuracy": accuracy}
