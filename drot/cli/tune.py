"""The command `drot tune`."""

from typing import Any

from drot.checkpoint.tables import Table
from drot.cli.bench import parse_sizes
from drot.cli.output import print_json, print_line, print_table
from drot.cli.progress_bars import working


def tune(
    model: str,
    tokens: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    as_json: bool = False,
) -> None:
    """Time on a GPU, ahead of time, which algorithm is the fastest for each product of a packed MODEL.

    The choices are kept in the tuning cache, so that no later process waits for them. A CPU has no choice.

    Example: drot tune llama-packed

    Arguments:
        model MODEL: A packed model: a name on the Hugging Face hub, or a local folder.
    Cases:
        tokens N,...: Tokens of the products, as in 512,2048. Each stands for all numbers up to the next power
            of two. Default: 32 to 8192. A model with a table of positions, such as OPT, takes at most as many
            tokens as the table has rows.
    Run:
        device:
        dtype: Dtype of the weights. auto is the dtype of the checkpoint.
    Output:
        as_json:
    """
    from drot.evaluation.tune import tune as tuned

    with working() as progress:
        result = tuned(
            model,
            tokens=parse_sizes("--tokens", tokens),
            device=device,
            dtype=dtype,
            progress=progress,
        )
    print_json(result) if as_json else print_tuned(result)


def print_tuned(result: dict[str, Any]) -> None:
    """Prints a row for each product that was measured, or why there is none."""
    if result["tuning_cache"] is None:
        print_line(f"{result['machine']} has one algorithm for each product: there is nothing to choose")
        return
    if not result["products"]:
        print_line(f"Nothing was left to measure: {result['tuning_cache']} has a choice for each product")
        return
    rows = [{"product": key, "algorithm": choice} for key, choice in result["products"].items()]
    print_table(Table(f"Written to {result['tuning_cache']}", rows), texts=2)
