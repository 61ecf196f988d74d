"""The tables of README.md, docs and benchmarks/README.md, made from the rows in benchmarks/results/.

    python benchmarks/figures.py            writes each table into its page, between its markers
    python benchmarks/figures.py --check    names the tables that differ from the rows, with exit status 1

Of rows that measure the same thing, the last one counts. It needs nothing but Python's own library.
"""

import argparse
import csv
import itertools
import math
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PAGES = (
    FOLDER / "README.md",
    *(
        FOLDER.parent / page
        for page in (
            "README.md",
            "docs/choose.md",
            "docs/hardware.md",
            "docs/index.md",
            "docs/records.md",
            "docs/scale.md",
        )
    ),
)
#: recipes of the rows `records`: the baseline, a solver alone, `balanced`, and `best`
PLAIN, SOLVER, BALANCED = "not rotated", "not rotated, solver of balanced", "full, balanced"
BEST, BEST_OF_OWN = "full, best", "full, best, equal outputs, 100 steps"
#: the model of `drot demo`, and the runs on it that docs/choose.md shows: their calibration and its tokens
TINY, CALIBRATED = "tiny-llama", ("wikitext2-valid", "32768")
#: the texts of the tables of records, in this order
TEXTS = "wikitext2-test", "python-heldout"
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
#: the columns of a text in the tables of records, behind its perplexity
OF_TEXT = ("gap closed", "KL", "same token")
#: columns that say where a row comes from, and not what it measures
ORIGIN = ("date", "commit", "machine", "torch", "transformers")

#: what `records`, `tuning` and `generate` measure
AGREEMENT = tuple(
    f"{figure}{place}" for figure in ("kl", "equal_tokens") for place in ("", "_first", "_last")
)
OF_TUNING = ("dense", "perplexity", *AGREEMENT)
OF_RECORDS = (*OF_TUNING, "seconds")
OF_GENERATE = ("p20_us", "median_us", "p80_us", "ratio", "tokens_per_second", "mib")
#: point of --rotation → the weights in the rows of bench_generate.py that it has when it is packed
POINTS = {"stock": "2:4", "light": "2:4 + blocks", "full": "2:4 + blocks + rotation"}

Row = dict[str, str]


def read(name: str, *measured: str) -> list[Row]:
    """The rows of results/`name`.csv; of rows that differ only in `measured` and their origin, the last."""
    with (FOLDER / "results" / f"{name}.csv").open(newline="") as file:
        last: dict[tuple[str, ...], Row] = {}
        for row in csv.DictReader(file):
            last[tuple(value for key, value in row.items() if key not in (*ORIGIN, *measured))] = row
    return list(last.values())


def table(head: Iterable[str], body: Iterable[Iterable[object]], used: Iterable[Row]) -> str:
    """A table in markdown, and a line with the commits and the machines of the rows that it shows."""
    head = list(head)
    lines = [head, ["---"] * len(head), *body]
    text = "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)
    used = list(used)
    commits = [
        f"{date}: {', '.join(sorted({row['commit'].rstrip('+') for row in used if row['date'] == date}))}"
        for date in sorted({row["date"] for row in used})
    ]
    machines = sorted({row["machine"] for row in used if "machine" in row})
    origin = textwrap.fill(f"Rows of {'; '.join(commits + machines)}.", 110)
    return f"{text}\n\n{origin}\n"


def gap_closed(dense: float, plain: float, found: float) -> list[str]:
    """The shares of the damage by pruning without a rotation, and of its logarithm, that a recipe undoes."""
    shares = (plain - found) / (plain - dense), math.log(plain / found) / math.log(plain / dense)
    return [f"{share:.0%}" for share in shares]


def median(rows: Iterable[Row], figure: str) -> float:
    return statistics.median(float(row[figure]) for row in rows)


#: recipe → text → the rows of the seeds
Runs = dict[str, dict[str, list[Row]]]


def runs() -> dict[tuple[str, str, str], Runs]:
    """The rows of real_models.py, by their model, calibration and tokens."""
    found: dict[tuple[str, str, str], Runs] = {}
    for row in read("records", *OF_RECORDS):
        of_case = found.setdefault((row["model"], row["calibration"], row["tokens"]), {})
        of_case.setdefault(row["recipe"], {}).setdefault(row["text"], []).append(row)
    return found


def text_cells(rows: list[Row], plain: list[Row]) -> list[str]:
    """The cells of a text: the perplexity with its range, and OF_TEXT with the ends of a window.

    plain: the rows of the pruning without a rotation, whose gap is closed; there may be none.
    """
    if not rows:
        return [""] * (1 + len(OF_TEXT))
    found = median(rows, "perplexity")
    values = sorted(float(row["perplexity"]) for row in rows)
    cells = [f"{found:.2f}" + (f" ({values[0]:.2f} … {values[-1]:.2f})" if len(values) > 1 else "")]
    shares = [median(rows, "dense"), median(plain, "perplexity"), found] if plain else []
    cells.append(" / ".join(gap_closed(*shares)) if plain and plain is not rows else "")
    ends = [row for row in rows if row["kl_first"]]  # older rows have none
    for figure, form in (("kl", ".3f"), ("equal_tokens", ".1%")):
        pair = " / ".join(f"{median(ends, f'{figure}_{end}'):{form}}" for end in ENDS if ends)
        cells.append(f"{median(rows, figure):{form}}" + (f" ({pair})" if pair else ""))
    return cells


def text_heads() -> list[str]:
    return [cell for text in TEXTS for cell in (text, *OF_TEXT)]


def recipe_cells(of_case: Runs, recipe: str, plain: str = PLAIN) -> list[str]:
    return [
        cell
        for text in TEXTS
        for cell in text_cells(of_case[recipe].get(text, []), of_case.get(plain, {}).get(text, []))
    ]


def dense_cells(of_case: Runs) -> list[str]:
    rows = {text: rows for of_recipe in of_case.values() for text, rows in of_recipe.items()}
    return [cell for text in TEXTS for cell in (f"{median(rows[text], 'dense'):.2f}", *[""] * len(OF_TEXT))]


def used_rows(of_case: Runs, recipes: Iterable[str]) -> list[Row]:
    return [row for recipe in recipes for rows in of_case[recipe].values() for row in rows]


def choices(recipes: dict[str, str], plain: dict[str, str] | None = None) -> Callable[[], str]:
    """A table of recipes on TINY: label → name of the recipe. `plain`: those of another gap than PLAIN's."""

    def make() -> str:
        of_case = runs()[TINY, *CALIBRATED]
        others = plain or {}
        body = [["dense", *dense_cells(of_case)]]
        body += [
            [label, *recipe_cells(of_case, recipe, others.get(recipe, PLAIN))]
            for label, recipe in recipes.items()
        ]
        used = used_rows(of_case, dict.fromkeys([*recipes.values(), *others.values()]))
        return table(["recipe", *text_heads()], body, used)

    return make


def training(layers: Iterable[tuple[str, str, str]], rows: list[Row]) -> str:
    runs = [("adam", "50"), ("adam", "100"), ("spectral", "50"), ("spectral", "100")]
    runs += [("fast", "50"), ("fast", "100")]
    default = {"pruned": "0.3", "entropy": "0.7"}
    body = []
    for layer in layers:
        own = {
            (row["optimizer"], row["steps"]): row
            for row in rows
            if (row["model"], row["layer"], row["objective"]) == layer
            and (row["optimizer"] != "fast" or row["lr"] == default[layer[2]])
        }
        ends = [f"{float(own[run]['loss_after']):.5g}" if run in own else "" for run in runs]
        paper = own.get(("paper", "2000"))
        body.append(
            [
                f"{layer[0]} {layer[1]}",
                layer[2],
                f"{float(own['fast', '50']['loss_before']):.5g}",
                f"{float(paper['loss_after']):.5g}" if paper else "",
                *ends,
                own["fast", "100"]["steps_to_paper"],
            ]
        )
    head = ["layer", "objective", "start", "`paper`, 2000 steps"]
    head += [f"{name}, {steps}" for name, steps in (("adam", 50), ("adam", 100))]
    head += ["spectral, 50", "spectral, 100", "`fast`, 50", "`fast`, 100", "`fast` below `paper` at step"]
    return table(head, body, rows)


def optimizer_rows() -> list[Row]:
    return read("optimizers", "loss_before", "loss_after", "steps_to_paper")


def optimizers() -> str:
    """The loss at the end of the training, by optimiser."""
    rows = [row for row in optimizer_rows() if not row["model"].startswith("synthetic")]
    return training(dict.fromkeys((row["model"], row["layer"], row["objective"]) for row in rows), rows)


def rates() -> str:
    """How far the loss of `fast` at each of its learning rates ends above the best of the three."""
    rows = [row for row in optimizer_rows() if row["optimizer"] == "fast"]
    runs: dict[tuple[str, ...], dict[str, float]] = {}
    for row in rows:
        name = row["model"] if row["model"].startswith("synthetic") else f"{row['model']} {row['layer']}"
        run = (row["objective"], name, row["steps"])
        runs.setdefault(run, {})[row["lr"]] = float(row["loss_after"])
    body = []
    for run, losses in sorted(runs.items(), key=lambda item: item[0][0], reverse=True):
        best = min(losses.values())
        body.append([*run, *(f"{lr}: {loss / best - 1:.1%}" for lr, loss in sorted(losses.items()))])
    return table(["objective", "layer", "steps", "low", "middle, the default", "high"], body, rows)


def finetuning() -> str:
    rows = read("finetuning", "perplexity")
    found = {(row["training"], row["lr"], row["rotation"]): row["perplexity"] for row in rows}
    body = [
        [training, lr, *(found.get((training, lr, rotation), "") for rotation in ("none", "layer"))]
        for training, lr in dict.fromkeys((row["training"], row["lr"]) for row in rows)
    ]
    return table(["training", "learning rate", "not rotated", "one rotation a layer"], body, rows)


def distillation() -> str:
    """Perplexity on each text after a training towards the dense model, by its tokens."""
    rows = read("distillation", "perplexity")
    texts = list(dict.fromkeys(row["text"] for row in rows))
    found = {(row["tokens"], row["lr"], row["text"]): row["perplexity"] for row in rows}
    runs = dict.fromkeys((row["tokens"], row["lr"]) for row in rows)
    body = [
        [f"{float(tokens) / 1e6:.1f} M", lr, *(found.get((tokens, lr, text), "") for text in texts)]
        for tokens, lr in sorted(runs, key=lambda run: (int(run[0]), run[1]))
    ]
    return table(["tokens", "learning rate", *texts], body, rows)


def operations() -> str:
    """The operations of a layer, by the formulas of pass_flops.py."""
    rows = read("pass_flops", "tflop")
    total = sum(float(row["tflop"]) for row in rows)
    body = [
        [row["part"], row["products"], row["tflop"], f"{float(row['tflop']) / total:.1%}"] for row in rows
    ]
    body.append(["all", "", f"{total:.1f}", ""])
    return table(["part of a layer", "products of", "TFLOP", "share"], body, rows)


def minutes() -> str:
    """The minutes of a model on one H100, counted by minutes.py, beside those that are wanted."""
    steps = ("weigh", "check", "calibrate", "rotate", "merge", "prune", "recover", "distill", "copies")
    rows = read("minutes", *steps, "save", "beside", "minutes", "wanted", "verdict")
    body = [
        [
            f"{row['model']}, `{row['quality']}`",
            *(row[step] for step in steps),
            row["beside"],
            row["minutes"],
            f"{row['wanted']}: {row['verdict']}",
        ]
        for row in rows
    ]
    return table(["model, quality", *steps, "beside", "minutes", "wanted"], body, rows)


def scale() -> str:
    """The minutes of a model on several H100, counted by minutes.py --ranks."""
    steps = ("weigh", "check", "calibrate", "rotate", "merge", "prune", "copies", "send")
    rows = read(
        "scale", *steps, "recover", "distill", "save", "beside", "minutes", "wanted", "efficiency",
        "wanted_efficiency", "verdict",
    )  # fmt: skip
    body = [
        [
            f"{row['model']}, `{row['quality']}`",
            row["ranks"],
            row["disk"],
            *(row[step] for step in steps),
            row["minutes"],
            f"{float(row['efficiency']):.0%}",
            " and ".join(
                [
                    *([f"{row['wanted']} minutes"] if row["wanted"] else []),
                    *([f"{float(row['wanted_efficiency']):.0%}"] if row["wanted_efficiency"] else []),
                ]
            )
            + (f": {row['verdict']}" if row["verdict"] else ""),
        ]
        for row in rows
    ]
    return table(["model", "GPUs", "disk", *steps, "minutes", "not lost", "wanted"], body, rows)


def headline() -> str:
    """Each model and text of the rows `records`: what drot's parts add, as medians of the seeds."""
    recipes = (PLAIN, SOLVER, BALANCED, BEST)
    cases = runs()
    body, used = [], []
    for (model, calibration, tokens), of_case in cases.items():
        if model == TINY or not of_case.keys() >= set(recipes):
            continue
        own_tokens = str(2 * int(tokens))  # as much text that the model wrote
        of_own = cases.get((model, f"{calibration} + own", own_tokens), {}).get(BEST_OF_OWN, {})
        for text in TEXTS:
            found = [of_case[recipe][text] for recipe in recipes]
            found += [of_own[text]] if text in of_own else []
            used += itertools.chain(*found)
            values = [median(found[0], "dense"), *(median(rows, "perplexity") for rows in found)]
            body.append([f"{model}, {text}", *(f"{value:.1f}" for value in values)])
    columns = ["dense", "SparseGPT", "+ solver", "+ rotation", "`best`", "`best`, own text"]
    return table(["model, text", *columns], body, used)


#: the eighths of a window of which rows have figures of their own
ENDS = "first", "last"


def records(of_tiny: bool = False) -> str:
    """The runs of real_models.py: medians of the seeds, with the range where there are several."""
    body, used = [], []
    cases = sorted(runs().items(), key=lambda item: (*item[0][:2], int(item[0][2])))
    for (model, calibration, tokens), of_case in cases:
        if (model == TINY) != of_tiny:
            continue
        body.append([model, calibration, tokens, "dense", "", *dense_cells(of_case), ""])

        def worst_first(recipe: str, of_case: Runs = of_case) -> float:
            return -median(of_case[recipe][TEXTS[0]], "perplexity")

        for recipe in sorted(of_case, key=worst_first):
            rows = of_case[recipe][TEXTS[0]]
            timed = [row for row in rows if row["seconds"]]
            seconds = f"{median(timed, 'seconds'):.0f}" if timed else ""
            body.append(["", "", "", recipe, len(rows), *recipe_cells(of_case, recipe), seconds])
        used += used_rows(of_case, of_case)
    head = ["model", "calibration", "tokens", "recipe", "seeds", *text_heads(), "seconds"]
    return table(head, body, used)


def tuning() -> str:
    """The settings of tuning.py: perplexities, and the differences to the default of the same seed."""
    rows = read("tuning", *OF_TUNING)
    found = {(row["setting"], row["text"], row["seed"]): row for row in rows}
    texts = list(dict.fromkeys(row["text"] for row in rows))
    body = []
    for setting in dict.fromkeys(row["setting"] for row in rows):
        seeds = [seed for name, text, seed in found if (name, text) == (setting, texts[0])]
        cells: list[object] = []
        for text in texts:
            pairs = [[found[name, text, seed] for name in ("default", setting)] for seed in seeds]
            of_setting = [row for _, row in pairs]
            cells.append(f"{median(of_setting, 'perplexity'):.2f}")
            for figure in ("perplexity", "kl"):
                ratios = [float(row[figure]) / float(default[figure]) - 1 for default, row in pairs]
                cells.append("" if setting == "default" else " ".join(f"{ratio:+.1%}" for ratio in ratios))
            cells.append(" / ".join(f"{median(of_setting, f'kl_{end}'):.3f}" for end in ENDS))
        body.append([setting, len(seeds), *cells])
    head = [cell for text in texts for cell in (text, "perplexity, each seed", "KL, each seed", "KL")]
    return table(["setting", "seeds", *head], body, rows)


def speeds(name: str, *functions: str) -> Callable[[], str]:
    """A table of a timed benchmark: the medians of drot's functions, and their speed against the others."""

    def make() -> str:
        rows = read(name, "p20_us", "median_us", "p80_us", "ratio")
        cases: dict[tuple[str, ...], dict[str, float]] = {}
        for row in rows:
            case = (row["case"], row["threads"], row["machine"])
            cases.setdefault(case, {})[row["function"]] = float(row["median_us"])
        body = []
        for case, medians in cases.items():
            for ours in functions:
                if ours not in medians:
                    continue
                others = [other for other in medians if other not in functions]
                ratios = [f"{medians[other] / medians[ours]:.2f} × {other}" for other in others]
                threads = f"{case[1]} thread{'s' * (case[1] != '1')}"
                place = case[2] if case[2].startswith("NVIDIA") else threads
                seconds = medians[ours] / 1e6
                time = f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
                body.append([case[0], place, ours, time, ", ".join(ratios)])
        return table(["case", "on", "function", "median", "as fast as"], body, rows)

    return make


def tiny_llama() -> str:
    """The runs of tiny_llama.py on a GPU."""
    rows = read("tiny_llama", "seconds", "perplexity", "packed")
    body = [[f"`{row['quality']}`", row["seconds"], row["perplexity"], row["packed"]] for row in rows]
    return table(["quality", "seconds", "perplexity", "packed"], body, rows)


def generate() -> str:
    """Tokens a second of generate() and bytes of the weights, against the dense model or another peer."""
    rows = read("generate", *OF_GENERATE)
    peers = {row["case"]: row["mib"] for row in rows if row["function"] == row["peer"]}
    body = []
    for row in rows:
        cells = [row["case"], row["threads"], row["function"], f"{float(row['tokens_per_second']):.1f}"]
        speed = share = ""
        if row["function"] != row["peer"]:
            speed = f"{row['ratio']} × {row['peer']}" + " (slower)" * (float(row["ratio"]) < 1)
            share = f"{float(row['mib']) / float(peers[row['case']]):.3f} ×" if row["mib"] else ""
        body.append([*cells, speed, row["mib"], share])
    head = ["case", "threads", "weights", "tokens/s", "as fast as", "MiB of weights", "of its peer's"]
    return table(head, body, rows)


def points() -> str:
    """The points of --rotation: perplexities of the default quality, and the cost of the rotations."""
    of_case = runs()[TINY, *CALIBRATED]
    timed = [row for row in read("generate", *OF_GENERATE) if row["case"].startswith("LLaMA shape of 1 GB")]
    of_weights = {row["function"]: row for row in timed}
    body, used = [], []
    for point, weights in POINTS.items():
        recipe = f"{point}, balanced"
        cells = []
        for text in TEXTS:
            perplexity, gap, *_ = text_cells(of_case[recipe][text], of_case[PLAIN][text])
            cells.append(f"{perplexity.partition(' ')[0]} ({gap.partition(' ')[0]})")
        row = of_weights[weights]
        share = float(row["mib"]) / float(of_weights["dense"]["mib"])
        body.append([f"`{point}`", *cells, f"{float(row['ratio']):.2f} ×", f"{share:.3f} ×"])
        used += [*used_rows(of_case, [recipe, PLAIN]), row]
    head = ["`--rotation`", *TEXTS, "tokens a second", "bytes of all weights"]
    return table(head, body, used)


def serve() -> str:
    """The runs of serving.py: what became of the requests, and the memory of the server."""
    figures = ("tokens_per_second", "median_s", "slowest_s", "mib")
    rows = read("serve", *figures, "answered", "cancelled", "malformed", "lost")
    body = [
        [
            f"{row['model']}, {row['way']}",
            row["threads"],
            row["clients"],
            *(row[kind] for kind in ("requests", "answered", "cancelled", "malformed", "lost")),
            *(row[figure] for figure in figures[:2]),
            row["mib"].replace(" ", ", "),
        ]
        for row in rows
    ]
    head = ["model", "threads", "clients", "requests", "answered", "cancelled", "4xx", "lost", "tokens/s"]
    return table([*head, "median s", "MiB at the start and after each round"], body, rows)


METHODS = [
    ("sparsegpt", "2:4"), ("wanda", "2:4"), ("magnitude", "2:4"), ("sparsegpt", "4:8"), ("sparsegpt", "0.5")
]  # fmt: skip


def plain_of(method: str, sparsity: str) -> str:
    return PLAIN if (method, sparsity) == METHODS[0] else f"{PLAIN}, {method} {sparsity}"


def one_shot_of(method: str, sparsity: str) -> str:
    return "full, one shot" + ("" if (method, sparsity) == METHODS[0] else f", {method} {sparsity}")


TABLES: dict[str, Callable[[], str]] = {
    "headline": headline,
    "records": records,
    "tuning": tuning,
    "tiny": lambda: records(of_tiny=True),
    "three_points": choices(
        {
            f"`{point}`, `{quality}`": f"{point}, {quality}"
            for quality in ("fast", "balanced")
            for point in POINTS
        }
    ),
    "sharing": choices(
        {
            "`light`": "light, fast",
            "`--layers-per-rotation 4`": "full, fast, 4 layers per R1",
            "`--layers-per-rotation 2`": "full, fast, 2 layers per R1",
            "`full`": "full, fast",
        }
    ),
    "down_rotations": choices(
        {
            "`--down-rotation none`": "full, one shot, no R3",
            "`--down-rotation 32`": "full, one shot, R3 in blocks of 32",
            "the default, 64": "full, one shot",
            "`--down-rotation 176`": "full, one shot, R3 in blocks of 176",
        }
    ),
    "qualities": choices(
        {
            "SparseGPT, not rotated": PLAIN,
            "the solver of `balanced`, not rotated": SOLVER,
            "`fast --solve none`": "full, one shot",
            "`fast`": "full, fast",
            "`balanced`, the default": BALANCED,
            "`balanced --recover block`": "full, balanced, recovered",
            "`best`": BEST,
        }
    ),
    "methods": choices(
        {
            f"{method} {sparsity}{where}": name
            for method, sparsity in METHODS
            for where, name in (
                (", not rotated", plain_of(method, sparsity)),
                ("", one_shot_of(method, sparsity)),
            )
        },
        plain={make(*method): plain_of(*method) for method in METHODS for make in (one_shot_of, plain_of)},
    ),
    "rotations": choices(
        {
            "the default of `fast`, 50 steps": "full, one shot",
            "`--steps 200`": "full, one shot, 200 steps",
            "`--training-tokens 0`: all calibration tokens": "full, one shot, all training tokens",
            "`--hessians dense`: layers trained independently": "full, one shot, dense Hessians",
            "`--rotation block:2`": "full, one shot, blocks 2",
            "`--rotation light`: one R1 for all layers": "light, one shot",
            "`--product-dtype bfloat16`, as on a GPU": "full, one shot, products in bfloat16",
            "`--objective entropy --steps 100`": "full, one shot, entropy, 100 steps",
            "`--objective entropy --optimizer paper --reference-compat`, no R3, 400 steps": (
                "full, one shot, paper, 400 steps"
            ),
        }
    ),
    "outputs": choices(
        {
            f"`{point}, fast`, `{weights}`": f"{point}, fast{name}"
            for point in POINTS
            for weights, name in (("equal", ", equal outputs"), ("gradient", ""))
        }
    ),
    "kept": choices(
        {
            "2:4 everywhere": "full, one shot",
            "`--keep 'layers.0.*'`": "full, one shot, keep layers.0.*",
            "`--keep down_proj`": "full, one shot, keep down_proj",
            "`--sparsity-of down_proj=4:8`": "full, one shot, down_proj=4:8",
        }
    ),
    "optimizers": optimizers,
    "rates": rates,
    "finetuning": finetuning,
    "distillation": distillation,
    "operations": operations,
    "minutes": minutes,
    "scale": scale,
    "entropy_loss": speeds("entropy_loss", "drot"),
    "pruned_importance": speeds("pruned_importance", "drot"),
    "batched_qr": speeds("batched_qr", "batched_qr", "cholesky_qr"),
    "nm_mask": speeds("nm_mask", "drot"),
    "sparsegpt_sweep": speeds("sparsegpt_sweep", "drot"),
    "rotation_step": speeds("rotation_step", "paper"),
    "sparse24_linear": speeds("sparse24_linear", "sparse24_linear"),
    "prune_layer": speeds("prune_layer", "drot", "drot, 50 steps", "drot, 100 steps"),
    "tiny_llama": tiny_llama,
    "swiglu_rotate": speeds("swiglu_rotate", "drot"),
    "rope": speeds("rope", "drot"),
    "generate": generate,
    "points": points,
    "serve": serve,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table differs")
    options = parser.parse_args()
    pages = {page: page.read_text(encoding="utf-8") for page in PAGES}
    names = [match[2] for text in pages.values() for match in MARKED.finditer(text)]
    if set(names) != set(TABLES):
        sys.exit(f"expected a marker for each of {', '.join(TABLES)}; got {', '.join(names)}")
    for page, text in pages.items():
        made = MARKED.sub(lambda match: match[1] + "\n" + TABLES[match[2]]() + "\n" + match[3], text)
        pairs = zip(MARKED.finditer(text), MARKED.finditer(made), strict=True)
        differing = [old[2] for old, new in pairs if old[0] != new[0]]
        if not options.check:
            page.write_text(made, encoding="utf-8")
        elif differing:
            sys.exit(
                f"{page} differs from the rows in {', '.join(differing)}: run python benchmarks/figures.py"
            )


if __name__ == "__main__":
    main()
