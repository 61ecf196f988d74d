"""What a run leaves: its manifest, the file of its rotations and the checkpoint."""

import shutil
import time
from pathlib import Path
from typing import Any

from drot.checkpoint.importance import save_importance_maps
from drot.checkpoint.manifest import FORMAT_VERSION, Manifest
from drot.checkpoint.quantization_config import format_of
from drot.checkpoint.records import MemoryPeak, Seconds
from drot.checkpoint.resume import OWN_TEXT, RunState
from drot.checkpoint.rotations import save_rotations
from drot.checkpoint.save import save_checkpoint
from drot.machine.devices import dtype_name
from drot.machine.environment import device_name, machine, versions
from drot.model.sizes import positions_of
from drot.pipeline.context import RunContext
from drot.pipeline.distill import distilled_part
from drot.pipeline.identity import calibration_record
from drot.pipeline.rotation_files import path_inside
from drot.pipeline.run import PruningRun
from drot.pipeline.steps import part_of
from drot.text.mixture import texts_of
from drot.text.names import OWN_SOURCE


def manifest_of(run: PruningRun, identity: dict[str, Any] | None, state: RunState | None) -> Manifest:
    """The manifest of a run whose layers are finished, without its files."""
    context = run.context
    format, stock = format_of(context.model.model)
    return Manifest.model_validate(
        {
            "format_version": FORMAT_VERSION,
            "base_model": context.source,
            "recipe": context.recipe,
            "calibration": calibration_record(context.tokens),
            "positions": positions_of(context.model.config),
            "layers": run.layers,
            "shared_rotation": run.shared_record,
            "rotations_left_out": context.model.family.lacks(context.recipe.rotation.mode),
            "rotations_file": None if run.given is None else run.given.entry,
            "untied_lm_head": run.untied,
            "sparsity": run.sparsity,
            "relative_logit_error": run.logit_error,
            "hidden_states": context.place_of_states,
            "dense_states_on_device": run.dense_states_on_device,
            "distillation": run.distillation or context.left_out,
            "versions": versions(),
            "device": device_name(context.device),
            "machine": machine(context.device),
            "other_machines": [] if state is None else state.other_machines,
            "dtype": dtype_name(context.save_dtype),
            "compute_dtype": dtype_name(context.dtype),
            "format": format,
            "stock_architecture": stock,
            "identity": identity,
            **_times(context, 0.0),
        }
    )


def _times(context: RunContext, total: float) -> dict[str, Any]:
    seconds = Seconds.model_validate({**context.watch.seconds, "total": total})
    peaks = {step: MemoryPeak.model_validate(peak) for step, peak in context.watch.peaks.items()}
    return {"seconds": seconds, "peak_memory": peaks}


def write_result(
    run: PruningRun,
    manifest: Manifest,
    out: Path | None,
    rotations_out: Path | None,
    state: RunState | None,
    started: float,
) -> Manifest:
    """Writes the rotations and the checkpoint, where they are wanted; returns the whole manifest."""
    context = run.context
    source = context.recipe.calibration.source

    def write_rotations(file: Path) -> None:
        record = {"model": context.source, **(manifest.identity or {})}
        save_rotations(file, run.rotations.values(), record)

    inside = path_inside(rotations_out, out)
    if rotations_out is not None and inside is None:
        write_rotations(rotations_out)
    if out is None or state is None:
        return manifest.model_copy(update=_times(context, time.perf_counter() - started))

    def write_more(folder: Path) -> None:
        save_importance_maps(folder, run.maps)
        if (own := state.folder / OWN_TEXT).exists() and OWN_SOURCE in dict(texts_of(source)):
            shutil.copyfile(own, folder / OWN_TEXT)
        if inside is not None:
            write_rotations(folder / inside)

    before_saving = time.perf_counter()

    def finish(manifest: Manifest) -> None:  # all else is written
        now = time.perf_counter()
        context.watch.seconds["save"] += now - before_saving
        for name, value in _times(context, now - started).items():
            setattr(manifest, name, value)

    part = part_of if run.distillation is None else distilled_part
    context.report("save")
    written = save_checkpoint(
        context.model.model,
        context.tokenizer,
        manifest,
        out,
        scratch=state.folder,
        write_layers=lambda folder: {
            state.file(name): state.record(name) for name in map(part, context.model.layers)
        },
        write_more=write_more,
        finish=finish,
    )
    state.discard()
    return written
