"""The command `drot finetune`: its options, and the check for options that would have no effect."""

from pathlib import Path
from typing import Annotated, Any

import typer

from drot.cli.options import OUTPUT, RUN, SOURCES, Json, option, print_json, stdout_for_the_result
from drot.cli.settings import options_of, with_settings
from drot.cli.tables import finetune_line, print_line
from drot.config import CalibrationConfig, FinetuneConfig
from drot.config.settings import fields_of
from drot.core.errors import UserError
from drot.core.events import silent

DEFAULT = FinetuneConfig()
TRAINING, TEXT = "Training", "Text"
EPILOG = "Example: drot finetune llama-2of4 --out llama-2of4-tuned --text wikitext2"
TRAINING_OPTIONS = options_of(DEFAULT, TRAINING, leave_out=("text", "held_out", "keep_adapter"))
TEXT_OPTIONS = options_of(
    DEFAULT.text,
    TEXT,
    source={"name": "text", "metavar": "[c4|ORG/NAME|PATH]", "help": f"Text to train on: {SOURCES}"},
    seed={"help": "Random seed of the positions at which sequences are cut, and of the training."},
)
HELD_OUT = options_of(DEFAULT, TEXT, only=("held_out",))
KEEP_ADAPTER = options_of(DEFAULT, OUTPUT, only=("keep_adapter",))


@with_settings(out=[*TRAINING_OPTIONS, *TEXT_OPTIONS, *HELD_OUT], as_json=KEEP_ADAPTER)
def finetune(
    model: Annotated[
        str,
        typer.Argument(
            metavar="DIR", help="A checkpoint that drot prune wrote, or a model pruned by another program."
        ),
    ],
    *,
    out: Annotated[Path, option(OUTPUT, "Folder to write. It must be new or empty.")],
    as_json: Json = False,
    device: Annotated[
        str,
        option(
            RUN,
            "Device to use. auto is the first GPU, or the CPU if there is no GPU. Several GPUs: accelerate "
            "launch -m drot finetune ...",
            metavar="[auto|cpu|cuda]",
            autocompletion=lambda: ["auto", "cpu", "cuda"],
        ),
    ] = "auto",
    **settings: Any,
) -> None:
    """Fine-tune the pruned model DIR by LoRA or in full. Its zeros stay zeros, and its format stays."""
    text = {"source": settings.pop("text")}
    text |= {name: settings.pop(name) for name in fields_of(CalibrationConfig) if name in settings}
    config = FinetuneConfig(**settings, text=CalibrationConfig(**text))
    check_effects(config)
    from drot.cli.progress_bars import progress_bar
    from drot.finetuning import finetune as finetuning

    with stdout_for_the_result(), progress_bar() as progress:
        if not finetuning.is_main_process():
            progress = silent
        result = finetuning.finetune(model, config, out=out, device=device, progress=progress)
    if not finetuning.is_main_process():
        return
    if as_json:
        print_json({"out": str(out), **result.manifest.to_dict()})
    else:
        print_line(finetune_line(result.manifest.finetune[-1]))
        print_line(f"Saved to {out}")


def check_effects(config: FinetuneConfig) -> None:
    """Raises UserError that names the options that differ from their defaults but have no effect."""
    lora_only = ("rank", "alpha", "dropout")
    changed = [name for name in lora_only if getattr(config, name) != getattr(DEFAULT, name)]
    if config.full and changed:
        raise UserError(f"`{changed[0]}` has no effect with `full=True`: leave one or the other out")
    if config.text.source.endswith(".txt") and config.text.text_column != DEFAULT.text.text_column:
        raise UserError("`text_column` has no effect with a .txt file: leave one or the other out")
