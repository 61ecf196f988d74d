"""The command `drot finetune`, and the check for options that would have no effect."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

from drot.checkpoint.tables import finetune_line
from drot.cli.options import SOURCES, options_of
from drot.cli.output import judging, print_json, print_line
from drot.cli.progress_bars import working
from drot.config import CalibrationConfig, FinetuneConfig, default_seqlen
from drot.config.settings import fields_of
from drot.core import torchrun
from drot.core.errors import UserError
from drot.core.events import silent
from drot.text.mixture import texts_of

DEFAULT = FinetuneConfig()
#: the options of the settings, by panel
SETTINGS = [
    *options_of(DEFAULT, "Training", leave_out=("text", "held_out", "keep_adapter")),
    *options_of(
        DEFAULT.text,
        "Text",
        source={"name": "text", "metavar": "[c4|ORG/NAME|PATH]", "help": f"Text to train on: {SOURCES}"},
        seed={"help": "Random seed of the positions at which sequences are cut, and of the training."},
    ),
    *options_of(DEFAULT, "Text", only=("held_out",)),
    *options_of(DEFAULT, "Output", only=("keep_adapter",)),
]


#: a number of tokens, as in 10M
COUNT = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>[kKmMgG]?)")
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def finetune(
    model: str,
    out: Path,
    tokens: str | None = None,
    as_json: bool = False,
    device: str = "auto",
    **settings: Any,
) -> None:
    """Fine-tune the pruned MODEL by LoRA or in full. Its zeros stay zeros, and its format stays.

    Example: drot finetune llama-2of4 --out llama-2of4-tuned --text wikitext2

    Arguments:
        model MODEL: A checkpoint that drot prune wrote, or a model pruned by another program: a folder, or a
            name on the Hugging Face hub.
    Training:
    Text:
        tokens COUNT: Tokens to train on, as in 10M, in place of --nsamples. They are cut into sequences of
            --seqlen tokens.
    Output:
        out:
        as_json:
    Run:
        device [auto|cpu|cuda]: Device to use. auto is the first GPU, or the CPU if there is no GPU. Several
            GPUs: accelerate launch -m drot finetune ...
    """
    text = {"source": settings.pop("text")}
    text |= {name: settings.pop(name) for name in fields_of(CalibrationConfig) if name in settings}
    chosen = CalibrationConfig(**text)
    if tokens is not None:
        chosen = dataclasses.replace(chosen, nsamples=sequences_of(tokens, model, chosen))
    config = FinetuneConfig(**settings, text=chosen)
    check_effects(config)
    from drot.finetuning import finetune as finetuning

    with working() as progress:
        if torchrun.rank():
            progress = silent
        result = finetuning.finetune(model, config, out=out, device=device, progress=progress)
    if torchrun.rank():
        return
    if as_json:
        print_json({"out": out, **result.manifest.to_dict()})
    else:
        print_line(finetune_line(result.manifest.finetune[-1]))
        print_line(f"Saved to {out}")
        print_line("Next:")
        if config.keep_adapter:
            print_line(f"  peft.PeftModel.from_pretrained(drot.load({model!r}), {str(out)!r})  # in Python")
        else:
            judge, measured = judging(out, chosen)
            print_line(f"  {judge}  # its perplexity on {measured}")


def sequences_of(tokens: str, model: str, text: CalibrationConfig) -> int:
    """The sequences of the text that hold `tokens`, the value of --tokens.

    Raises UserError for what is no number of tokens, and if `nsamples` is given too.
    """
    from drot.checkpoint.opening import load_config
    from drot.model.sizes import positions_of

    if text.nsamples != DEFAULT.text.nsamples:
        raise UserError("`tokens` sets `nsamples`: leave one or the other out")
    match = COUNT.fullmatch(tokens)
    count = float(match["number"]) * UNITS[match["unit"].upper()] if match else 0.0
    if count < 1:
        raise UserError(f"`tokens` must be a number of tokens, as in 10M; got {tokens!r}")
    return math.ceil(count / (text.seqlen or default_seqlen(positions_of(load_config(model)))))


def check_effects(config: FinetuneConfig) -> None:
    """Raises UserError that names the options that differ from their defaults but have no effect."""
    lora_only = ("rank", "alpha", "dropout")
    changed = [name for name in lora_only if getattr(config, name) != getattr(DEFAULT, name)]
    if config.full and changed:
        raise UserError(f"`{changed[0]}` has no effect with `full=True`: leave one or the other out")
    texts = [text for text, _ in texts_of(config.text.source)]
    if all(text.endswith(".txt") for text in texts) and config.text.text_column != DEFAULT.text.text_column:
        raise UserError("`text_column` has no effect with a .txt file: leave one or the other out")
