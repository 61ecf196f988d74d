"""`drot prune --dry-run`: prints the settings of a run and what it needs."""

from dataclasses import fields
from typing import Any

from rich.table import Table

from drot.checkpoint.size import size_text
from drot.cli.options import print_json, stdout_for_the_result
from drot.cli.tables import output, print_line, scaled
from drot.config import Recipe


def show_needs(model: str, recipe: Recipe, as_json: bool, **options: Any) -> None:
    """Prints the resolved recipe as a recipe file, and a table of what the run needs; or both as JSON.

    Args:
        model: name on the hub or folder of the model.
        recipe: the settings.
        as_json: whether to print JSON.
        options: further arguments of `run_needs`.
    """
    from drot.pipeline.dry_run import run_needs

    with stdout_for_the_result():
        needs = run_needs(model, recipe, **options)
    if as_json:
        facts = {field.name: getattr(needs, field.name) for field in fields(needs)}
        print_json(facts | {"recipe": needs.recipe.to_dict(), "format": needs.recipe.format})
        return
    import yaml

    for line in yaml.safe_dump(needs.recipe.to_dict(), sort_keys=False, allow_unicode=True).splitlines():
        print_line(line)
    print_line("")
    table = Table(show_header=False, box=None, pad_edge=False)
    on_cpu = "CPU" in needs.device
    for fact, value in {
        "model": needs.model,
        "result": f"{needs.recipe.format}, {needs.save_dtype}",
        "computed": f"in {needs.dtype} on {needs.device}",
        "calibration": f"{needs.tokens:,} tokens, of which {needs.training_tokens:,} train the rotations",
        "disk": f"{size_text(needs.checkpoint)} for OUT, and {size_text(needs.partial)} for OUT.partial "
        "while the run lasts",
        "main memory": f"about {size_text(needs.main_memory + on_cpu * needs.device_memory)}",
        **({} if on_cpu else {"memory of the device": f"about {size_text(needs.device_memory)}"}),
        "time": _time(needs.seconds, sum(sum(phase.values()) for phase in needs.work.values())),
    }.items():
        table.add_row(fact, value)
    output().print(table)


def _time(seconds: float | None, operations: float) -> str:
    amount = f"{scaled(operations, 'FLOP')} of matrix products and factorisations"
    if seconds is None:
        return f"not known: {amount}; drot info --measure measures how fast this machine computes them"
    least = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return f"{least} or more: {amount} at the machine's measured peak, which no run reaches"
