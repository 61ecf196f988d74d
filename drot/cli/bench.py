"""The command `drot bench`, and its table."""

from typing import Any

from drot.cli.log import tell
from drot.cli.output import print_json, print_line, print_table, scaled, three_digits
from drot.cli.progress_bars import working
from drot.core.errors import UserError
from drot.manifest.tables import NONE, Table


def bench(
    model: str | None = None,
    shape: str | None = None,
    tokens: str | None = None,
    batches: str | None = None,
    repeats: int = 10,
    minutes: float | None = None,
    device: str = "auto",
    dtype: str = "auto",
    as_json: bool = False,
) -> None:
    """Time 2:4 against dense weights, with and without rotations, in a decoder layer and a whole model.

    The column 'rate' is the FLOP/s of a prefill, counted as dense, or the weight bytes/s of a decode.

    Example: drot bench --shape llama-3-8b --batch 1,8

    Arguments:
        model MODEL: A model with 2:4 weights: a name on the Hugging Face hub, or a local folder.
    Cases:
        shape [llama-2-7b|llama-3-8b|llama-3-70b|llama-3-405b|qwen2.5-7b|qwen3-8b]: Instead of MODEL: time
            random weights in the dimensions of this model.
        tokens N,...: Time a prefill of one sequence, for each of these numbers of tokens, as in 128,2048.
            Without --tokens and --batch: 128 to 8192 tokens.
        batches N,...: Time the decoding of one token per sequence, for each of these numbers of sequences, as
            in 1,8. Without --tokens and --batch: 1 to 32 sequences.
        repeats: Repetitions of each case. The table shows the median, and below 3 repetitions no verdict.
        minutes: Leave out the cases that would end later than this after the start. Making or loading the
            weights counts. Default: 3 on a CPU, no limit on a GPU.
    Run:
        device:
        dtype: Dtype of the weights. auto is the dtype of the checkpoint.
    Output:
        as_json:
    """
    from drot.speed.speed import announcement, check_arguments, measure_speed

    sizes, sequences = parse_sizes("--tokens", tokens), parse_sizes("--batch", batches)
    check_arguments(model, shape, sizes, sequences, repeats, minutes)
    with working() as progress:
        tell(f"drot: {announcement(model, shape, minutes=minutes, device=device, dtype=dtype)}")
        figures = measure_speed(
            model,
            shape,
            tokens=sizes,
            batches=sequences,
            repeats=repeats,
            minutes=minutes,
            device=device,
            dtype=dtype,
            progress=progress,
        )
    if as_json:
        print_json(figures)
    else:
        print_speed(figures)


def parse_sizes(option: str, text: str | None) -> list[int] | None:
    """The numbers in the value `text` of an option, such as `1,8`; None if the option was not given."""
    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{option} must be whole numbers separated by commas; got {text!r}") from None


def print_speed(data: dict[str, Any]) -> None:
    """Prints a row for each variant of each case, and the names of the cases that were left out."""
    rows: list[dict[str, str]] = []
    for row in data["rows"]:
        first = row["variant"] == data["variants"][row["what"]][0]
        rows += [{}] * first
        rows.append(
            {
                "case": f"{row['what']} {row['phase']} {row['size']}" if first else "",
                "weights": row["variant"],
                "ms": three_digits(row["milliseconds"]),
                "tokens/s": three_digits(row["tokens_per_second"]),
                "rate": scaled(row["bound"], "B/s" if row["phase"] == "decode" else "FLOP/s"),
                "MiB": three_digits(row["weight_bytes"] / 2**20),
                "against dense": NONE
                if row["speedup"] is None
                else f"{row['speedup']:.2f} x, {row['verdict']}",
            }
        )
    if rows:
        title = f"{data['model']}, {data['dtype']}, {data['machine']}, medians of {data['repeats']}"
        print_table(Table(title, rows[1:]), texts=2, narrow=True)
    if data["left_out"]:
        print_line(
            "Left out to end in time (allow more --minutes, or fewer or smaller --tokens, --batch or "
            f"--repeats): {', '.join(data['left_out'])}"
        )
