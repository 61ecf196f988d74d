"""The command `drot finetune`: its options, and the check for options that would have no effect."""

from pathlib import Path
from typing import Annotated

import typer

from drot.cli.options import (
    OUTPUT,
    RUN,
    SEQLEN_DEFAULT,
    SOURCES,
    TEXT_COLUMN,
    Json,
    option,
    print_json,
    stdout_for_the_result,
)
from drot.cli.tables import finetune_line, print_line
from drot.config import FINETUNE_LR, CalibrationConfig, FinetuneConfig
from drot.core.errors import UserError
from drot.core.events import silent

DEFAULT = FinetuneConfig()
TRAINING, TEXT = "Training", "Text"
EPILOG = "Example: drot finetune llama-2of4 --out llama-2of4-tuned --text wikitext2"


def finetune(
    model: Annotated[
        str,
        typer.Argument(
            metavar="DIR", help="A checkpoint that drot prune wrote, or a model pruned by another program."
        ),
    ],
    *,
    full: Annotated[
        bool,
        option(
            TRAINING,
            "Train all kept weights of the decoder layers' linears, and the norms, instead of LoRA. Takes "
            "16 bytes of memory a weight, and more for the activations.",
            "--full",
        ),
    ] = DEFAULT.full,
    rank: Annotated[int, option(TRAINING, "LoRA's rank r.")] = DEFAULT.rank,
    alpha: Annotated[
        float, option(TRAINING, "LoRA's product is multiplied by alpha / rank.")
    ] = DEFAULT.alpha,
    dropout: Annotated[float, option(TRAINING, "Dropout on LoRA's inputs.")] = DEFAULT.dropout,
    lr: Annotated[
        float | None,
        option(
            TRAINING,
            f"Learning rate. Default: {FINETUNE_LR['lora']:g}, with --full {FINETUNE_LR['full']:g}.",
        ),
    ] = DEFAULT.lr,
    weight_decay: Annotated[float, option(TRAINING, "Weight decay of AdamW.")] = DEFAULT.weight_decay,
    warmup_steps: Annotated[
        int | None,
        option(
            TRAINING,
            "Steps in which the learning rate rises; it then falls to 0. Default: 400, or a tenth of all "
            "steps if that is less.",
        ),
    ] = DEFAULT.warmup_steps,
    epochs: Annotated[int, option(TRAINING, "Passes over the sequences.")] = DEFAULT.epochs,
    batch_size: Annotated[
        int, option(TRAINING, "Sequences in a forward pass of one GPU.")
    ] = DEFAULT.batch_size,
    accumulation: Annotated[
        int, option(TRAINING, "Forward passes of one GPU in a step of the optimiser.")
    ] = DEFAULT.accumulation,
    gradient_checkpointing: Annotated[
        bool,
        option(
            TRAINING,
            "Compute activations again in the backward pass: less memory, more time.",
            "--gradient-checkpointing",
        ),
    ] = DEFAULT.gradient_checkpointing,
    text: Annotated[
        str,
        option(
            TEXT,
            f"Text to train on: {SOURCES}",
            metavar="[c4|ORG/NAME|PATH]",
        ),
    ] = DEFAULT.text.source,
    nsamples: Annotated[int, option(TEXT, "Number of sequences to cut from the text.")] = (
        DEFAULT.text.nsamples
    ),
    seqlen: Annotated[
        int | None, option(TEXT, f"Tokens in a sequence. {SEQLEN_DEFAULT}")
    ] = DEFAULT.text.seqlen,
    seed: Annotated[
        int,
        option(TEXT, "Random seed of the positions at which sequences are cut, and of the training."),
    ] = DEFAULT.text.seed,
    text_column: Annotated[str, option(TEXT, TEXT_COLUMN)] = DEFAULT.text.text_column,
    held_out: Annotated[
        int,
        option(
            TEXT,
            "Sequences at the end of the text that are not trained on. Their perplexity is measured before "
            "and after.",
        ),
    ] = DEFAULT.held_out,
    out: Annotated[Path, option(OUTPUT, "Folder to write. It must be new or empty.")],
    keep_adapter: Annotated[
        bool,
        option(
            OUTPUT,
            "Write LoRA's matrices as an adapter that peft opens on top of DIR, instead of a model with the "
            "zeros of DIR. DIR must not be packed.",
            "--keep-adapter",
        ),
    ] = DEFAULT.keep_adapter,
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
) -> None:
    """Fine-tune the pruned model DIR by LoRA or in full. Its zeros stay zeros, and its format stays."""
    config = FinetuneConfig(
        full=full,
        keep_adapter=keep_adapter,
        rank=rank,
        alpha=alpha,
        dropout=dropout,
        lr=lr,
        weight_decay=weight_decay,
        warmup_steps=warmup_steps,
        epochs=epochs,
        batch_size=batch_size,
        accumulation=accumulation,
        gradient_checkpointing=gradient_checkpointing,
        held_out=held_out,
        text=CalibrationConfig(
            source=text, nsamples=nsamples, seqlen=seqlen, seed=seed, text_column=text_column
        ),
    )
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
