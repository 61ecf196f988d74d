"""`drot prune --dry-run`: prints the settings of a run and what it needs."""

import functools
from pathlib import Path
from typing import Any

from rich.filesize import decimal as size_text

from drot.cli.output import print_facts, print_json, print_line
from drot.cli.progress_bars import working
from drot.config import Recipe

#: in words, where the hidden states of the calibration lie
PLACES = {
    "device": "on the device",
    "main memory": "in main memory",
    "file": "in a file on the disk of OUT while the run lasts, since the main memory does not hold them",
}


def show_needs(
    model: str,
    recipe: Recipe,
    as_json: bool,
    *,
    out: Path | None,
    save_rotations_to: Path | None,
    resume: bool,
    **options: Any,
) -> None:
    """Prints the resolved recipe as a recipe file, and a table of what the run needs; or both as JSON.

    Raises UserError for a folder `out` and a file `save_rotations_to` that the run could not write.

    options: further arguments of `run_needs`.
    """
    from drot.checkpoint.resume import check_unfinished
    from drot.checkpoint.save import check_output
    from drot.machine.devices import is_gpu, pick_device
    from drot.pipeline.dry_run import run_needs
    from drot.pipeline.rotation_files import check_rotations_output
    from drot.pipeline.work import measured_rate, seconds_at

    if out is not None and not resume:
        check_output(out, dry_run=True)
        check_unfinished(out, resume=resume)
    if save_rotations_to is not None:
        check_rotations_output(save_rotations_to, recipe, out, resume=resume, dry_run=True)
    with working():
        needs = run_needs(model, recipe, **options)
        device = pick_device(options["device"], kernels=True)
        seconds = seconds_at(needs.work, functools.partial(measured_rate, device))
        seconds /= needs.gpus if is_gpu(device) else 1  # ranks on a CPU share it
    if as_json:
        facts = vars(needs) | {
            "recipe": needs.recipe.to_dict(),
            "format": needs.recipe.format,
            "seconds": seconds,
        }
        print_json(facts)
        return
    import yaml

    for line in yaml.safe_dump(needs.recipe.to_dict(), sort_keys=False, allow_unicode=True).splitlines():
        print_line(line)
    print_line("")
    on_cpu, shared = "CPU" in needs.device, needs.gpus > 1
    in_memory = needs.main_memory + on_cpu * needs.gpus * needs.device_memory
    of_all = f", for all {needs.gpus} ranks" if shared else ""
    or_all = "" if needs.tokens_known else ", or all of a shorter text"
    facts = {
        "model": needs.model,
        "result": f"{needs.recipe.format}, {needs.save_dtype}",
        "computed": f"in {needs.dtype} on {f'{needs.gpus} ranks, each on ' if shared else ''}{needs.device}",
        "calibration": f"{needs.tokens:,} tokens{or_all}; {needs.training_tokens:,} train the rotations",
        "disk": f"{size_text(needs.checkpoint)} for OUT, and {size_text(needs.partial)} of what "
        "OUT.partial holds while the run lasts",
    }
    if save_rotations_to is not None:
        facts["rotations"] = (
            f"{size_text(needs.rotations_file)} for {save_rotations_to}, and as much again on its disk while "
            "it is written"
        )
    facts["main memory"] = f"about {size_text(in_memory)}{of_all}, beside 0.5 GB of a process without a model"
    facts["hidden states"] = f"{size_text(needs.states)}, {PLACES[needs.place_of_states]}{of_all}"
    if not on_cpu:
        name = "memory of each device" if shared else "memory of the device"
        facts[name] = f"about {size_text(needs.device_memory)}"
    if needs.distillation:
        facts["training together"] = (
            f"about {size_text(needs.distillation)} for the kept weights of all layers; left out where there "
            "is less"
        )
    facts["time"] = _time(seconds, sum(sum(phase.values()) for phase in needs.work.values()))
    print_facts(facts.items())


def _time(seconds: float, operations: float) -> str:
    least = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    if seconds >= 2 * 3600:
        least = f"{seconds / 3600:.1f} hours"
    amount = f"{operations / 1e12:.3g} TFLOP of matrix products and factorisations"
    return f"{least} or more: {amount}, at the rate of a product that was timed now and no run reaches"
