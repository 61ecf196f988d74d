"""`drot.prune`, which makes a pruned model and its checkpoint from a model and a recipe."""

import contextlib
import functools
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drot.checkpoint.disk_space import check_space
from drot.checkpoint.dtypes import cast_weights
from drot.checkpoint.hf_model import as_drot_model
from drot.checkpoint.load import load_model
from drot.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from drot.checkpoint.resume import RunState, check_unfinished, identity_differences, partial_folder
from drot.checkpoint.save import check_output, check_saves
from drot.config import Recipe
from drot.core.checks import is_a
from drot.core.errors import UserError
from drot.core.events import Progress, silent
from drot.core.files import WriteError, same_disk
from drot.core.lock import locked
from drot.core.version import __version__
from drot.machine.environment import machine, versions
from drot.machine.products import fp32_products, without_autocast
from drot.machine.ranks import RankEnded, Ranks, joined
from drot.pipeline.batches import DISTILL_HELD_OUT_SHARE, check_sequences
from drot.pipeline.context import RunContext
from drot.pipeline.disk import disk_needs, rotations_file_bytes
from drot.pipeline.distill import lacking
from drot.pipeline.identity import identity_of_parts, run_identity
from drot.pipeline.memory import state_bytes
from drot.pipeline.output import manifest_of, write_result
from drot.pipeline.prepare import prepare
from drot.pipeline.rotation_files import (
    check_rotations_output,
    check_same_rotations,
    read_given,
    with_given_r3,
)
from drot.pipeline.run import PruningRun
from drot.pipeline.sizes import sizes_of
from drot.pipeline.states import place_of_states
from drot.sparse.packed import check_format, check_packable

logger = logging.getLogger("drot")


@dataclass(frozen=True)
class PruneResult:
    """The result of `drot.prune`. Its repr is one line, without the model and the manifest.

    in_memory: the pruned model, if the run had all of it in memory.
    manifest: the content of drot.json.
    out: the folder of the checkpoint; None if no checkpoint was written.
    finished_before: whether `resume=True` found that `out` holds the result already.
    """

    in_memory: PreTrainedModel | None = field(repr=False)
    manifest: Manifest = field(repr=False)
    out: Path | None
    finished_before: bool = False

    @functools.cached_property
    def model(self) -> PreTrainedModel:
        """The pruned model, on the device where it was loaded.

        A run that read the layers from files, or found the result in `out`, has no model in memory: the first
        access loads it from `out`. Raises UserError as `drot.load` does.
        """
        if self.in_memory is not None:
            return self.in_memory
        assert self.out is not None, "a run without `out` has its model in memory"
        return load_model(self.out)


@fp32_products("ieee")
@without_autocast()
@torch.inference_mode(False)  # in which gradients are unknown
def prune(
    model: str | Path | PreTrainedModel,
    recipe: Recipe | None = None,
    *,
    out: str | Path | None = None,
    tokenizer: Any = None,
    calibration: Tensor | None = None,
    distillation: Tensor | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    save_dtype: str | torch.dtype = "auto",
    rotations: str | Path | None = None,
    save_rotations_to: str | Path | None = None,
    format: str = "dense",
    resume: bool = False,
    progress: Progress = silent,
) -> PruneResult:
    """Rotates and prunes a causal language model (paper, algorithm 1).

    Raises UserError for a mistake in the input, and InvarianceError if a rotation changed the model's
    outputs. In both cases nothing is written to `out`. While the run lasts, `out` is locked: another run that
    would write to it raises UserError at once.

    Args:
        model: a name on the Hugging Face hub, a local folder, or a loaded model, which is changed in place.
        recipe: the settings of the run; None is `Recipe()`.
        out: the folder of the checkpoint, which must be new or empty. None writes no checkpoint.
        tokenizer: the tokenizer for the calibration text. A loaded model needs it, or `calibration`.
        calibration: token ids [nsamples, seqlen], which replace the calibration text of the recipe.
        distillation: with `calibration`, token ids [n, seqlen] for the training of all layers together
            (`distill_epochs`), which is left out without them. They should be others. Of fewer than the
            recipe's `distill_nsamples`, each pass reads them up to three times.
        device: the device of the computation, to which one layer at a time is moved. A loaded model stays
            where it lies. Of a model that `model` names, a run with `out` reads each layer from its files
            when its turn comes, and drops it when it is saved; a run without `out` loads all of it. Under
            torchrun all ranks share the run, and `cuda` is the GPU of each.
        dtype: dtype of the computation. `auto` is the checkpoint's dtype on a GPU, and float32 on a CPU. A
            loaded model is computed in its own.
        save_dtype: dtype of the weights in the result and in `out`; `auto` is the dtype of the model before
            the run. The weights of a linear are rounded once, when it is pruned. Its errors in the manifest
            are those before the rounding; `sparsity` counts the zeros after it.
        rotations: a file written by `save_rotations_to`, whose rotations are used instead of training.
        save_rotations_to: a new file for the rotations, which other sparsities and methods can reuse. It may
            be inside `out`.
        format: `dense`, or `packed`, which stores values and positions of 2:4 weights, and others dense.
        resume: continues an interrupted run with the same model, recipe and calibration, whose finished
            layers are in `<out>.partial`. Of a finished run it returns the result.
        progress: the callback for ProgressEvents.
    """
    started = time.perf_counter()
    is_a("recipe", recipe, Recipe, or_none=True)
    is_a("resume", resume, bool)
    paths = {"out": out, "rotations": rotations, "save_rotations_to": save_rotations_to}
    for name, path in paths.items():
        is_a(name, path, str, Path, or_none=True)
    recipe = with_given_r3(recipe or Recipe(), rotations)
    check_format(format, recipe.pruning)
    out, rotations_out = (None if path is None else Path(path) for path in (out, save_rotations_to))
    with joined() as ranks, contextlib.ExitStack() as opened:
        same = {"recipe": recipe.to_dict(), "out": str(out), "format": format, "resume": resume}
        _check_same(ranks, same | {"drot": __version__, "dtype": str(dtype), "save_dtype": str(save_dtype)})
        finished = ranks.on_first(lambda: _enter(opened, out, rotations_out, recipe, resume))
        context = prepare(
            model,
            recipe,
            tokenizer=tokenizer,
            calibration=calibration,
            distillation=distillation,
            device=device,
            dtype=dtype,
            save_dtype=save_dtype,
            rotations_given=rotations is not None,
            format=format,
            out=out,
            finished=finished,
            progress=progress if ranks.first else silent,
            ranks=ranks,
        )
        if out is not None and not finished:
            ranks.on_first(lambda: check_saves(context.model.model, context.tokenizer))
        context.watch.seconds["load"] = time.perf_counter() - started
        _check_trainings(context)
        given = None if rotations is None else read_given(context, Path(rotations))
        run = PruningRun(context, given)
        return _run(run, out, rotations_out, finished=finished, started=started)


def _check_trainings(context: RunContext) -> None:
    """Raises UserError if a training has too few sequences to hold some out and train each rank.

    Warns if the layers will not be trained together.
    """
    if context.recipe.recovery.recover == "block":
        check_sequences(len(context.tokens), 'recover="block"', ranks=context.ranks)
    if context.distill_tokens is not None:
        check_sequences(
            len(context.distill_tokens),
            "distill_epochs",
            "distill_nsamples",
            context.ranks,
            DISTILL_HELD_OUT_SHARE,
        )
        if (reason := lacking(context)) and context.ranks.first:
            logger.warning(
                "the kept weights of all layers will not be trained together: %s. `recover=block` trains "
                "those of each layer alone", reason,
            )  # fmt: skip


def _enter(
    opened: contextlib.ExitStack, out: Path | None, rotations_out: Path | None, recipe: Recipe, resume: bool
) -> bool:
    """Locks `out` until `opened` ends. Returns whether it holds a finished run that is resumed.

    Raises UserError if nothing can be written.
    """
    if out is None and resume:
        raise UserError("`resume` needs `out`: name the `out` of the interrupted run")
    finished = out is not None and resume and (out / MANIFEST).exists()
    if out is not None and not finished:
        check_output(out)
    if rotations_out is not None:
        check_rotations_output(rotations_out, recipe, out, resume=resume)
    if out is not None:
        opened.enter_context(locked(out))
        if not finished:
            check_unfinished(out, resume=resume)
    return finished


def _check_same(ranks: Ranks, values: dict[str, Any]) -> None:
    """Raises UserError, on all ranks, if the values of a rank differ from those of rank 0."""
    if ranks.size == 1:
        return
    first, *others = ranks.each(json.loads(json.dumps(values)))
    for rank, other in enumerate(others, 1):
        if changed := identity_differences(first, other, "rank 0", f"in rank {rank}"):
            raise UserError(f"all ranks must do the same run: {changed}")


def _run(
    run: PruningRun, out: Path | None, rotations_out: Path | None, *, finished: bool, started: float
) -> PruneResult:
    """Executes the run and writes its result, or loads the result of a run that is `finished`."""
    context, model, ranks = run.context, run.context.model, run.context.ranks
    state: RunState | None = None
    if context.dense_linears is not None:
        check_packable(model.model, context.dense_linears)
    identity = run_identity(context, run.given) if out is not None or rotations_out is not None else None
    _check_same(ranks, (identity or {}) | {"versions": versions()})
    if rotations_out is not None:
        ranks.on_first(lambda: check_same_rotations(rotations_out, identity or {}))
    if out is not None and identity is not None:
        if finished:
            return ranks.on_first(lambda: _finished_result(out, identity, rotations_out))
        state = _open_state(context, out, identity, rotations_out)
    with _says_how_to_resume(ranks, state):
        run.execute(state)

        def finish() -> Manifest:
            with model.in_memory(*model.ends):
                run.rotate_ends()
                if context.save_dtype != context.dtype:
                    cast_weights(model.model, context.save_dtype, "save_dtype")
                as_drot_model(model.model)
                manifest = manifest_of(run, identity, state)
                return write_result(run, manifest, out, rotations_out, state, started)

        # without a checkpoint, the result is the model in the memory of every rank
        manifest = finish() if out is None else ranks.on_first(finish)
        if out is None or ranks.first:  # the others keep a model whose ends are not rotated
            context.end()
    return PruneResult(None if model.is_skeleton else model.model, manifest, out)


def _open_state(
    context: RunContext, out: Path, identity: dict[str, Any], rotations_out: Path | None
) -> RunState:
    """The state of the run. Raises UserError if it is of another run, or if the disk is too small."""
    here = {"versions": versions(), **machine(context.device)}
    state = RunState(out, identity_of_parts(identity), here, context.ranks)
    sizes = sizes_of(context.model, *context.tokens.shape)
    kept, multimodal = None, getattr(context.model.model, "drot_multimodal", None)
    if multimodal is not None:
        kept = multimodal.kept_bytes(context.save_dtype if context.rotates else None)
    checkpoint, beside = disk_needs(sizes, context.recipe, context.save_dtype, kept)
    if rotations_out is not None and same_disk(rotations_out, out):
        beside += 2 * rotations_file_bytes(sizes, context.recipe.rotation)  # twice while it is written
    given = context.sizes, context.recipe, context.dtype
    if place_of_states(*given, context.device, ranks=context.ranks) == "file":
        beside += context.ranks.local_size * state_bytes(*given)

    def check() -> None:
        written = sum(file.stat().st_size for file in state.folder.glob("*.safetensors"))
        check_space(out, checkpoint, beside, written)

    context.ranks.on_first(check)
    return state


@contextlib.contextmanager
def _says_how_to_resume(ranks: Ranks, state: RunState | None) -> Iterator[None]:
    """Adds to a WriteError, as on a full disk, and to RankEnded, that the finished parts are kept.

    torchrun ends the other ranks as Ctrl-C does when a rank has ended: that is RankEnded too. So is an error
    of NCCL outside a call of `ranks`.
    """
    kept = "the finished parts are kept"
    if state is not None:
        ranks.then = f"; {kept}: continue with --resume (in Python `resume=True`)"
    try:
        yield
    except (WriteError, RankEnded, KeyboardInterrupt, RuntimeError) as error:
        told = str(error) if isinstance(error, WriteError | RankEnded) else ranks.who_ended()
        if told is None:
            raise
        if state is not None and (not ranks.first or state.folder.exists()):
            room = "make room and " if isinstance(error, WriteError) else ""
            told += f"; {kept}: {room}continue with `resume=True`"
        raise UserError(told) from error


def _finished_result(out: Path, identity: dict[str, Any], rotations: Path | None) -> PruneResult:
    """The result of a run that is finished already. Raises UserError if `out` is the result of another run.

    identity: of this run. rotations: where the caller wants the rotations.
    """
    manifest = read_manifest(out)
    if manifest.finetune:
        raise UserError(f"{out} holds a model that was fine-tuned after its run: name another `out`")
    before = (manifest.identity or {}) | {"format": manifest.format, "save_dtype": manifest.dtype}
    if changed := identity_differences(before, identity, "the finished run"):
        raise UserError(f"{out} is the result of another run: {changed}; name another `out`")
    if rotations is not None and not rotations.exists():
        raise UserError(f"{out} is finished, and its rotations were not saved to {rotations}: prune again")
    if partial_folder(out).exists():  # the run was killed after its last step
        RunState(out, identity_of_parts(identity)).discard()
    return PruneResult(None, manifest, out, finished_before=True)
