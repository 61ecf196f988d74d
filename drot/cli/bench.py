"""The command `drot bench`, and its table."""

from typing import Any

from drot.checkpoint.tables import NONE, Table
from drot.cli.output import print_json, print_table, three_digits
from drot.cli.progress_bars import working
from drot.core.errors import UserError


def bench(
    model: str | None = None,
    shape: str | None = None,
    tokens: str | None = None,
    batches: str | None = None,
    compile: bool = False,
    repeats: int = 10,
    device: str = "auto",
    dtype: str = "auto",
    as_json: bool = False,
) -> None:
    """Time 2:4 against dense weights, with and without rotations, in a decoder layer and a whole model.

    Example: drot bench --shape llama-3-8b --batch 1,8

    Arguments:
        model MODEL: A model with 2:4 weights: a name on the Hugging Face hub, or a local folder. If
            its layers are of several kinds, or some linears are dense, only the whole model is timed.
    Cases:
        shape [llama-2-7b|llama-3-8b|llama-3-70b|llama-3-405b|qwen2.5-7b|qwen3-8b]: Instead of MODEL: time
            a decoder layer with random weights in the dimensions of this model.
        tokens N,...: Time a prefill of one sequence, for each of these numbers of tokens, as in 128,2048.
            Without --tokens and --batch: 128 to 8192 tokens, on a CPU 128. A model with a table of positions,
            such as OPT, takes at most as many tokens as the table has rows.
        batches N,...: Time the decoding of one token per sequence, for each of these numbers of sequences, as
            in 1,8. Without --tokens and --batch: 1 to 32 sequences, on a CPU 1 and 8.
        compile: With MODEL: also time one sequence with the compiled step of drot chat --compile, for the
            dense weights and for MODEL. Each takes 5 to 20 seconds to compile.
        repeats: Repetitions of each case. The table shows the median, and below 3 repetitions no verdict.
    Run:
        device:
        dtype: Dtype of the weights. auto is the dtype of the checkpoint.
    Output:
        as_json:
    """
    from drot.evaluation.speed import measure_speed

    sizes, sequences = parse_sizes("--tokens", tokens), parse_sizes("--batch", batches)
    with working() as progress:
        figures = measure_speed(
            model,
            shape,
            tokens=sizes,
            batches=sequences,
            compile=compile,
            repeats=repeats,
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
    """Prints a row for each variant of each case."""
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
                "MiB": three_digits(row["weight_bytes"] / 2**20),
                "against dense": NONE
                if row["speedup"] is None
                else f"{row['speedup']:.2f} x, {row['verdict']}",
            }
        )
    title = f"{data['model']}, {data['dtype']}, {data['machine']}, medians of {data['repeats']}"
    print_table(Table(title, rows[1:]), texts=2, narrow=True)
