"""The tables of README.md, docs and benchmarks/README.md, made from the rows in benchmarks/results/.

    python benchmarks/figures.py            writes each table into its page, between its markers
    python benchmarks/figures.py --check    names the tables that differ from the rows, with exit status 1

Of rows that measure the same thing, the last one counts. It needs nothing but Python's own library.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable

from _rows import FOLDER, Row, read, table
from record_tables import OF_GENERATE, OF_RECORDED

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
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


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
            row["adapters"],
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
    return table(["model", "GPUs", "disk", "adapters", *steps, "minutes", "not lost", "wanted"], body, rows)


def threads(row: Row) -> str:
    """The threads of a row, and whether the CPU has AMX: its rows are not those of other CPUs."""
    return f"{row['threads']} thread{'s' * (row['threads'] != '1')}" + ", AMX" * ("AMX" in row["machine"])


def speeds(name: str, *functions: str) -> Callable[[], str]:
    """A table of a timed benchmark: the medians of drot's functions, and their speed against the others."""

    def make() -> str:
        rows = read(name, "p20_us", "median_us", "p80_us", "ratio")
        cases: dict[tuple[str, ...], dict[str, float]] = {}
        for row in rows:
            case = (row["case"], threads(row), row["machine"])
            cases.setdefault(case, {})[row["function"]] = float(row["median_us"])
        body = []
        for case, medians in cases.items():
            for ours in functions:
                if ours not in medians:
                    continue
                others = [other for other in medians if other not in functions]
                ratios = [f"{medians[other] / medians[ours]:.2f} × {other}" for other in others]
                place = case[2] if case[2].startswith("NVIDIA") else case[1]
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


def serving_vllm() -> str:
    """The rows of serving_vllm.py: tokens a second of vLLM's server, and the memory of its processes."""
    rows = read("serving_vllm", "seconds", "tokens_per_second", "ratio", "mib")
    body = [
        [
            *(row["model"], row["requests_at_once"], threads(row), row["variant"], row["tokens_per_second"]),
            f"{row['ratio']} ×" + " (slower)" * (float(row["ratio"]) < 1),
            row["seconds"].replace(" ", ", "),
            row["mib"],
        ]
        for row in rows
    ]
    head = ["model", "requests at once", "on", "weights", "tokens/s", "as fast as dense"]
    return table([*head, "seconds of each round", "MiB of the processes"], body, rows)


TABLES: dict[str, Callable[[], str]] = {
    **OF_RECORDED,
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
    "experts": speeds("experts", "2:4", "2:4 + blocks"),
    "prune_layer": speeds("prune_layer", "drot", "drot, 50 steps", "drot, 100 steps"),
    "tiny_llama": tiny_llama,
    "swiglu_rotate": speeds("swiglu_rotate", "drot"),
    "rope": speeds("rope", "drot"),
    "generate": generate,
    "serve": serve,
    "serving_vllm": serving_vllm,
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
