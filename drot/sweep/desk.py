"""The work on one cell of a sweep, and what all cells share."""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drot.checkpoint.dtypes import cast_weights
from drot.checkpoint.load import load, load_config, load_tokenizer
from drot.checkpoint.resume import read_journal
from drot.config import CalibrationConfig, Recipe, default_seqlen
from drot.core.errors import BrokenModelError, UserError
from drot.core.events import Progress, ProgressEvent
from drot.core.files import write_json, writing
from drot.evaluation.evaluate import move_models
from drot.evaluation.perplexity import check_logits, load_eval_tokens, perplexity_of
from drot.evaluation.predictions import check_windows, predict
from drot.evaluation.tasks import Tasks, load_tasks, run_tasks
from drot.machine.devices import computing_dtype, dtype_name
from drot.machine.environment import machine_name, versions
from drot.manifest.integrity import json_digest, weights_record, with_digest
from drot.model.families import positions_of
from drot.pipeline.prune import prune
from drot.pipeline.validation import check_seqlen
from drot.sweep.figures import figures_of
from drot.sweep.grid import Cell, effective
from drot.text.source import calibration_hash, load_calibration

logger = logging.getLogger("drot")

#: what a sweep keeps in its folder: figures of the dense model and of cells, rotations, and models
DENSE, CELLS, ROTATIONS, MODELS = "dense.json", "cells", "rotations", "models"
#: digits of the SHA-256 that names a cell or a rotation file
KEY_DIGITS = 16


class Desk:
    """What all cells of a sweep share: the model, the texts and the settings of the call.

    Args:
        model: name on the hub or folder of the model.
        out: folder of the sweep.
        seqlen: tokens in a window; None is `default_seqlen` of the model.
        text_column: the column of the text.
        devices: the devices of the runs; the first measures.
        dtype: dtype of the computation.
        keep_models: whether the models of the cells are kept.
        progress: the callback for ProgressEvents.
    """

    def __init__(
        self,
        model: str,
        out: Path,
        seqlen: int | None,
        text_column: str,
        devices: list[torch.device],
        dtype: str,
        keep_models: bool,
        progress: Progress,
    ) -> None:
        self.model, self.out, self.text_column = model, out, text_column
        self.devices, self.keep_models, self.progress = devices, keep_models, progress
        self.dtype = str(computing_dtype(dtype, devices[0]))
        self.tokenizer, self.config = load_tokenizer(model), load_config(model)
        self.seqlen = default_seqlen(positions_of(self.config)) if seqlen is None else seqlen
        self.texts: dict[str, Tensor] = {}
        self.tasks: Tasks | None = None
        self.calibration: dict[CalibrationConfig, Tensor] = {}
        #: what the figures of every cell depend on beside its recipe
        self.identity: dict[str, Any] = {}

    def read_texts(self, sources: list[str]) -> None:
        """Reads the texts of the perplexity."""
        for source in sources:
            tokens = load_eval_tokens(source, self.tokenizer, self.text_column, self.progress)
            check_windows(tokens, self.config.get_text_config(), self.seqlen)
            self.texts[source] = tokens

    def load_tasks(self, names: list[str]) -> None:
        """Loads the tasks of the accuracy."""
        if names:
            self.tasks = load_tasks(names)

    def read_calibration(self, recipe: Recipe) -> None:
        """Reads the calibration tokens of a recipe, if no cell before it has the same."""
        settings = recipe.calibration
        if not recipe.reads_calibration or settings in self.calibration:
            return
        seqlen = settings.resolved_seqlen(positions_of(self.config))
        check_seqlen(seqlen, self.config)
        self.calibration[settings] = load_calibration(
            settings.source,
            self.tokenizer,
            nsamples=settings.nsamples,
            seqlen=seqlen,
            seed=settings.seed,
            text_column=settings.text_column,
            progress=self.progress,
        )

    def dense_figures(self) -> dict[str, dict[str, float]]:
        """The dense model's figures as in `_measure`, which are measured unless an earlier call did."""
        self.progress(ProgressEvent(phase="load"))
        model = load(self.model, device="cpu", dtype=self.dtype)
        self.identity = {
            "weights": weights_record(model.state_dict()),
            "dtype": dtype_name(model.dtype),
            "seqlen": self.seqlen,
            "texts": {source: calibration_hash(tokens) for source, tokens in self.texts.items()},
        }
        if self.tasks is not None:
            self.identity["tasks"] = list(self.tasks.tasks)
        before = read_journal(self.out / DENSE)
        if before is None or before["identity"] != self.identity:
            before = {"identity": self.identity, **self._measure(model)}
            with writing(self.out):
                for folder in (CELLS, ROTATIONS):
                    (self.out / folder).mkdir(parents=True, exist_ok=True)
            write_json(self.out / DENSE, with_digest(before))
        return {figure: before[figure] for figure in ("perplexity", "accuracy")}

    def key(self, cell: Cell) -> str:
        """The name of a cell: a hash of all that its figures depend on."""
        settings = effective(cell.recipe)
        return _short_digest([settings | {"calibration": self._calibration_hash(cell.recipe)}, self.identity])

    def rotations_key(self, recipe: Recipe) -> str | None:
        """A hash of all that the rotations of a recipe depend on; None if they depend on pruned layers.

        The entropy does not depend on the sparsity, unless some linears are kept dense.
        """
        if recipe.rotation.mode == "none" or recipe.rotation.resolved_hessians != "dense":
            return None
        settings = recipe.to_dict()
        fields = ["method", "damping", "damping_average"]
        if recipe.objective != "entropy" or recipe.pruning.mixed:
            fields += ["sparsity", "sparsity_of", "keep"]
        pruning = {field: settings["pruning"][field] for field in fields}
        same = {"weights": self.identity["weights"], "dtype": self.identity["dtype"]}
        return _short_digest([settings["rotation"], pruning, self._calibration_hash(recipe), same])

    def run(self, cell: Cell, key: str, rotations: str | None) -> dict[str, Any]:
        """Prunes and measures a cell; writes its record and returns it.

        cell: the cell.
        key: its name.
        rotations: name of the rotations that it shares with other cells; None if it shares none.
        """
        file, trained = self.out / ROTATIONS / f"{rotations}.safetensors", None
        if rotations is not None:
            trained = read_journal(file.with_suffix(".json"))
        # a cell that was interrupted between its training and its record repeats the training
        reused = trained is not None and trained["cell"] != key and file.exists()
        if rotations is not None and not reused and not self.keep_models:
            file.unlink(missing_ok=True)  # prune does not replace a file of another run
        kept: dict[str, Any] = {}
        if self.keep_models:
            # the manifest of a checkpoint names its calibration text, so that the text is read again
            kept = {"out": self.out / MODELS / key, "resume": True}
        else:
            kept = {"calibration": self.calibration.get(cell.recipe.calibration)}
        result = prune(
            self.model,
            cell.recipe,
            tokenizer=self.tokenizer,
            device=",".join(map(str, self.devices)),
            dtype=self.dtype,
            rotations=file if reused else None,
            save_rotations_to=file if rotations is not None and not reused else None,
            progress=self.progress,
            **kept,
        )
        figures = figures_of(result.manifest)
        if reused and trained is not None:
            figures |= trained["training"]
        elif rotations is not None:
            training = {
                name: figures[name] for name in ("entropy_before", "entropy_after", "seconds_per_step")
            }
            write_json(file.with_suffix(".json"), with_digest({"cell": key, "training": training}))
        if self.dtype != "auto":  # the result has the dtype of the checkpoint
            cast_weights(result.model, getattr(torch, self.dtype))
        by = None
        if cell.recipe.rotation.mode != "none":
            by = trained["cell"] if reused and trained is not None else key
        record = {
            "recipe": cell.recipe.to_dict(),
            "identity": self.identity,
            "calibration": self._calibration_hash(cell.recipe),
            **self._measure(result.model, cell),
            **figures,
            "trained_by": by,
            "machine": machine_name(self.devices[0]),
            "versions": versions(),
        }
        plain: dict[str, Any] = json.loads(json.dumps(record))
        write_json(self.out / CELLS / f"{key}.json", with_digest(plain))
        return plain

    def _calibration_hash(self, recipe: Recipe) -> str | None:
        tokens = self.calibration.get(recipe.calibration) if recipe.reads_calibration else None
        return None if tokens is None else calibration_hash(tokens)

    def _measure(
        self, model: PreTrainedModel, cell: Cell | None = None
    ) -> dict[str, dict[str, float | None]]:
        """`perplexity`, by text, and `accuracy`, by task, of a model.

        If its loss is not finite, the figures of a cell's model are None, and a warning says so.
        """
        streamed = move_models([model], self.model, self.devices[0], stream=False)
        if streamed and self.tasks is not None:
            raise UserError(
                f"tasks need the whole of {self.model} on {self.devices[0]}, where it does not fit"
            )
        found: dict[str, float | None] = {}
        for source, tokens in self.texts.items():
            stream_to = self.devices[0] if streamed else None
            predictions = predict(model, tokens, self.seqlen, stream_to, self.progress)
            try:
                found[source] = perplexity_of(predictions, progress=self.progress)
            except BrokenModelError as error:
                if cell is None:
                    raise
                logger.warning("a cell has no perplexity on %s: %s", source, error)
                found[source] = None
        return {"perplexity": found, "accuracy": self._accuracies(model, cell)}

    def _accuracies(self, model: PreTrainedModel, cell: Cell | None) -> dict[str, float | None]:
        if self.tasks is None:
            return {}
        try:
            check_logits(model)
        except BrokenModelError as error:
            if cell is None:
                raise
            logger.warning("a cell has no accuracy: %s", error)
            return dict.fromkeys(self.tasks.tasks)
        return {name: score.accuracy for name, score in run_tasks(model, self.tokenizer, self.tasks).items()}


def _short_digest(data: Any) -> str:
    return json_digest(data)[:KEY_DIGITS]
