"""The tables of the rows of real_models.py and tuning.py: perplexity, and agreement with the dense model."""

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterable

from _rows import Row, read, table

#: recipes of the rows `records`: the baseline, a solver alone, `balanced`, and `best`
PLAIN, SOLVER, BALANCED = "not rotated", "not rotated, solver of balanced", "full, balanced"
BEST = "full, best"
#: what the names of recipes hold whose settings were the default once, or were compared with it then
EARLIER = "equal outputs", "equal tokens", "100 steps", "three passes", "recovered"
#: the model of `drot demo`, and the runs on it that docs/choose.md shows: their calibration and its tokens
TINY, CALIBRATED = "tiny-llama", ("wikitext2-valid", "32768")
#: the texts of the tables of records, in this order
TEXTS = "wikitext2-test", "python-heldout"
#: the columns of a text in the tables of records, behind its perplexity
OF_TEXT = ("gap closed", "KL", "same token")
#: what `records`, `tuning` and `generate` measure
AGREEMENT = tuple(
    f"{figure}{place}" for figure in ("kl", "equal_tokens") for place in ("", "_first", "_last")
)
OF_TUNING = ("dense", "perplexity", *AGREEMENT)
OF_RECORDS = (*OF_TUNING, "seconds")
OF_GENERATE = ("p20_us", "median_us", "p80_us", "ratio", "tokens_per_second", "mib")
#: point of --rotation → the weights in the rows of bench_generate.py that it has when it is packed
POINTS = {"stock": "2:4", "light": "2:4 + blocks", "full": "2:4 + blocks + rotation"}

#: the eighths of a window of which rows have figures of their own
ENDS = "first", "last"


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


def headline() -> str:
    """Each model and text of the rows `records`: what drot's parts add, as medians of the seeds."""
    recipes = (PLAIN, SOLVER, BALANCED, BEST)
    cases = runs()
    body, used = [], []
    for (model, calibration, tokens), of_case in cases.items():
        if model == TINY or not of_case.keys() >= set(recipes):
            continue
        own_tokens = str(2 * int(tokens))  # as much text that the model wrote
        of_own = cases.get((model, f"{calibration} + own", own_tokens), {}).get(BEST, {})
        for text in TEXTS:
            found = [of_case[recipe][text] for recipe in recipes]
            found += [of_own[text]] if text in of_own else []
            used += itertools.chain(*found)
            values = [median(found[0], "dense"), *(median(rows, "perplexity") for rows in found)]
            body.append([f"{model}, {text}", *(f"{value:.1f}" for value in values)])
    columns = ["dense", "SparseGPT", "+ solver", "+ rotation", "`best`", "`best`, own text"]
    return table(["model, text", *columns], body, used)


def is_earlier(recipe: str) -> bool:
    """Whether a recipe has settings that were the default, or that were compared with it then."""
    return any(part in EARLIER for part in recipe.split(", "))


def records(of_tiny: bool = False, earlier: bool = False) -> str:
    """The runs of real_models.py: medians of the seeds, with the range where there are several.

    earlier: as `is_earlier`; tiny-llama's stand together.
    """
    body, used = [], []
    cases = sorted(runs().items(), key=lambda item: (*item[0][:2], int(item[0][2])))
    for (model, calibration, tokens), of_case in cases:
        recipes = [recipe for recipe in of_case if of_tiny or is_earlier(recipe) == earlier]
        if (model == TINY) != of_tiny or not recipes:
            continue
        body.append([model, calibration, tokens, "dense", "", *dense_cells(of_case), ""])

        def worst_first(recipe: str, of_case: Runs = of_case) -> float:
            return -median(of_case[recipe][TEXTS[0]], "perplexity")

        for recipe in sorted(recipes, key=worst_first):
            rows = of_case[recipe][TEXTS[0]]
            timed = [row for row in rows if row["seconds"]]
            seconds = f"{median(timed, 'seconds'):.0f}" if timed else ""
            body.append(["", "", "", recipe, len(rows), *recipe_cells(of_case, recipe), seconds])
        used += used_rows(of_case, recipes)
    head = ["model", "calibration", "tokens", "recipe", "seeds", *text_heads(), "seconds"]
    return table(head, body, used)


def tuning(base: str) -> str:
    """The settings of tuning.py for a recipe: perplexities, and the differences to a seed's default."""
    rows = [row for row in read("tuning", *OF_TUNING) if row["base"] == base]
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


METHODS = [
    ("sparsegpt", "2:4"), ("wanda", "2:4"), ("magnitude", "2:4"), ("sparsegpt", "4:8"), ("sparsegpt", "0.5")
]  # fmt: skip


def plain_of(method: str, sparsity: str) -> str:
    return PLAIN if (method, sparsity) == METHODS[0] else f"{PLAIN}, {method} {sparsity}"


def one_shot_of(method: str, sparsity: str) -> str:
    return "full, one shot" + ("" if (method, sparsity) == METHODS[0] else f", {method} {sparsity}")


OF_RECORDED: dict[str, Callable[[], str]] = {
    "headline": headline,
    "records": records,
    "earlier": lambda: records(earlier=True),
    "tuning": functools.partial(tuning, BALANCED),
    "tuning_of_rotations": functools.partial(tuning, "full, fast"),
    "tuning_of_training": functools.partial(tuning, BEST),
    "points": points,
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
}
