"""The command `drot sample`."""

import shlex
from pathlib import Path

from drot.cli.output import print_json, print_line
from drot.cli.progress_bars import working


def sample(
    model: str,
    out: Path,
    tokens: int = 262144,
    seqlen: int = 512,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "auto",
    as_json: bool = False,
) -> None:
    """Let MODEL write a text for the calibration of `drot prune`.

    The text is of all kinds that MODEL knows, such as code, also of those that your own text lacks. Calibrate
    with both. The whole model must fit on the device. drot prune --calibration TEXT,own does the same within
    its run; this command is for a text that several runs read, or that another machine writes.

    Example: drot sample llama --out own.jsonl

    Arguments:
        model MODEL: The model that is to be pruned: a name on the Hugging Face hub, or a local folder.
    Text:
        out FILE.jsonl: File to write, with a text in each row. It must be new.
        tokens: Length of the text in tokens, rounded up to whole rows. The default is enough for drot prune
            --calibration TEXT,own.jsonl with its other defaults. With --quality best give 600000, and
            1200000 with --nsamples 256: a tenth more than the run reads, because some tokens merge when
            the text is tokenised again.
        seqlen: Tokens of a row. Each row begins with a random token.
        seed: Seed of the random tokens. The same seed gives the same text on the same machine.
    Run:
        device:
        dtype: Dtype of the weights. auto is the dtype of the checkpoint.
    Output:
        as_json:
    """
    from drot.pipeline import own_text

    with working() as progress:
        rows = own_text.sample(
            model, out, tokens=tokens, seqlen=seqlen, seed=seed, device=device, dtype=dtype, progress=progress
        )
    if as_json:
        print_json({"out": out, "rows": rows, "seqlen": seqlen})
        return
    print_line(f"Wrote {rows} rows of {seqlen} tokens to {out}. Next, beside your own text TEXT:")
    texts = shlex.quote(f"TEXT,{out}")
    print_line(f"  drot prune {shlex.quote(model)} --calibration {texts} --out DIR")
