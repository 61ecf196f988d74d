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
from drot.checkpoint.offload import open_skeleton
from drot.checkpoint.opening import load_config
from drot.checkpoint.resume import OWN_TEXT, read_journal
from drot.config import CalibrationConfig, ResolvedRecipe, default_seqlen
from drot.config.settings import values_of
from drot.core.errors import BrokenModelError
from drot.core.events import Progress, ProgressEvent
from drot.core.files import write_json, writing
from drot.core.hashes import json_digest, weights_record, with_digest
from drot.evaluation import choices
from drot.evaluation.evaluate import Setup, measure, prepare_tasks
from drot.evaluation.models import OpenModel
from drot.evaluation.perplexity import load_eval_tokens
from drot.evaluation.predictions import check_windows
from drot.machine.devices import computing_dtype, dtype_name
from drot.machine.environment import machine_name, versions
from drot.machine.ranks import ALONE
from drot.model.decoder import DecoderModel
from drot.model.sizes import positions_of
from drot.pipeline.prune import prune
from drot.pipeline.tokens import TextReader
from drot.reporting.grid import Cell, Grid, effective
from drot.reporting.rows import run_columns
from drot.text.mixture import texts_of
from drot.text.names import OWN_SOURCE
from drot.text.source import calibration_hash

logger = logging.getLogger("drot")

#: what a sweep keeps in its folder: the figures of the dense model and of cells
DENSE, CELLS = "dense.json", "cells"
#: with what the names of the texts begin that a model wrote, which lie there before the figures
OWN_TEXTS = Path(OWN_TEXT).stem
#: digits of the SHA-256 that names a cell
KEY_DIGITS = 16

#: `perplexity`: text → perplexity; `accuracy`: task → accuracy in [0, 1]; None if it is not finite
CellFigures = dict[str, dict[str, float | None]]


def weights_in_files(model: str, dtype: str = "auto") -> dict[str, Any]:
    """What the weights of a model in `dtype` are (`weights_record`), by the files that hold them."""
    skeleton, weights, _ = open_skeleton(model, dtype)
    parts = DecoderModel(skeleton, weights=weights).parts_of_state
    return weights_record(skeleton.state_dict(), parts=parts)


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
        dtype: str | torch.dtype,
        progress: Progress,
    ) -> None:
        self.model, self.out = model, out
        self.dtype = dtype_name(computing_dtype(dtype, device))
        self.tokenizer, self.config = load_tokenizer(model), load_config(model)
        asked, seqlen = grid.asked, grid.asked.seqlen or default_seqlen(positions_of(self.config))
        self.texts: dict[str, Tensor] = {}
        for source in asked.texts:
            tokens = load_eval_tokens(source, self.tokenizer, asked.text_column, progress)
            check_windows(tokens, self.config.get_text_config(), seqlen)
            self.texts[source] = tokens
        tasks = prepare_tasks(asked.tasks)
        self.setup = Setup(
            seqlen=seqlen, device=device, task_names=asked.tasks, tasks=tasks, progress=progress
        )
        #: the names of the tasks that are measured
        self.tasks = [*choices.task_names(asked.tasks, self.texts), *(tasks.tasks if tasks else ())]
        #: the calibration tokens of a text, and those of the training of all layers by their number
        self.calibration: dict[CalibrationConfig, Tensor] = {}
        self.distillation: dict[tuple[CalibrationConfig, int], Tensor | None] = {}
        self._read_tokens([cell.resolved for cell in cells if cell.resolved.reads_calibration])
        #: what the figures of every cell depend on besides its recipe
        self.identity: dict[str, Any] = {}
        self.dense = self._measure_dense()

    def _read_tokens(self, recipes: Sequence[ResolvedRecipe]) -> None:
        """Reads the tokens of all recipes, with one text of the model for all recipes of one calibration.

        The first of these recipes is the one that reads most of it, because the model writes it then.
        """
        readers: dict[CalibrationConfig, TextReader] = {}
        writes = any(OWN_SOURCE in dict(texts_of(recipe.calibration.source)) for recipe in recipes)
        weights = weights_in_files(self.model) if writes else None  # they write other texts at the same path
        for recipe in sorted(recipes, key=lambda recipe: -recipe.recovery.distill_nsamples):
            text, further = recipe.calibration, recipe.recovery.distill_nsamples
            if text not in readers:
                key = json_digest([self.model, weights, self.dtype, values_of(text), further])[:KEY_DIGITS]
                readers[text] = TextReader(
                    model=self.model, tokenizer=self.tokenizer, config=self.config, device=self.setup.device,
                    dtype=self.dtype, progress=self.setup.progress, ranks=ALONE,
                    own_text=self.out / f"{OWN_TEXTS}_{key}.jsonl",
                )  # fmt: skip
            if (text, further) not in self.distillation:
                _, self.calibration[text], self.distillation[text, further] = readers[text].read(
                    recipe, self.calibration.get(text), None, measures=False
                )

    def _measure_dense(self) -> Any:
        """The figures of the dense model, as in `_measure`."""
        self.setup.progress(ProgressEvent(phase="load"))
        model = load(self.model, device="cpu", dtype=self.dtype)
        self.identity = {
            "weights": weights_record(model.state_dict()),
            "dtype": dtype_name(model.dtype),
            "seqlen": self.setup.seqlen,
            "texts": {source: calibration_hash(tokens) for source, tokens in self.texts.items()},
        }
        if self.tasks:
            self.identity["tasks"] = self.tasks
        before = read_journal(self.out / DENSE)
        if before is not None and before["identity"] == self.identity:
            return before
        measured = {"identity": self.identity, **self._measure(model)}
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
        further = self.distillation.get((text, resolved.recovery.distill_nsamples))
        if further is None:  # also if the text has too little for the training of all layers
            recipe = recipe.replace(distill_epochs=0)
            recovery = dataclasses.replace(resolved.recovery, distill_epochs=0, distill_nsamples=0)
            resolved = dataclasses.replace(resolved, recovery=recovery)
        else:  # of a short text, each pass reads the sequences as often as in drot.prune
            recipe = recipe.replace(distill_nsamples=resolved.recovery.distill_nsamples)
        result = prune(
            self.model,
            recipe,
            tokenizer=self.tokenizer,
            device=self.setup.device,
            dtype=self.dtype,
            progress=self.setup.progress,
            calibration=self.calibration.get(text),
            distillation=further,
        )
        if self.dtype != "auto":  # the result has the dtype of the checkpoint
            cast_weights(result.model, getattr(torch, self.dtype))
        record = {
            "recipe": resolved.to_dict(),
            "identity": self.identity,
            "calibration": self._calibration_hash(cell.resolved),
            **self._measure_cell(result.model),
            **run_columns(result.manifest),
            "machine": machine_name(self.setup.device),
            "versions": versions(),
        }
        plain: dict[str, Any] = json.loads(json.dumps(record))
        write_json(self.out / CELLS / f"{key}.json", with_digest(plain))
        return plain

    def _calibration_hash(self, recipe: ResolvedRecipe) -> str | None:
        tokens = self.calibration.get(recipe.calibration) if recipe.reads_calibration else None
        return None if tokens is None else calibration_hash(tokens)

    def _measure(self, model: PreTrainedModel) -> CellFigures:
        """The figures of a model. Raises BrokenModelError for a model without a finite loss."""
        figures = measure(OpenModel(model), self.model, self.tokenizer, self.texts, self.setup)
        return {"perplexity": figures["perplexity"], "accuracy": figures["tasks"]}

    def _measure_cell(self, model: PreTrainedModel) -> CellFigures:
        """The figures of a pruned model, which may be broken."""
        try:
            return self._measure(model)
        except BrokenModelError as error:
            logger.warning("a cell has no figures: %s", error)
            return {"perplexity": dict.fromkeys(self.texts), "accuracy": dict.fromkeys(self.tasks)}
