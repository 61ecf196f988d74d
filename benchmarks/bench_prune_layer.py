"""One decoder layer through the whole of `drot prune`, and the paper's training of the same layer.

Two models of the named shape, with one layer and with --layers of them, random weights and a small
vocabulary, are pruned on random tokens, from a folder and to a folder, with the recipe of each named quality.
The difference is what a layer takes; the rest of the first model is what a model takes once. So a model of
70B parameters is measured on one device without its checkpoint. Its embedding and lm_head are left out.

The peer `paper` is the training of the same layer in the paper's formulation (bench_rotation_step.py): a few
of its steps are measured, and their median is scaled up to its 2000 steps. For the whole layer, the peer
takes drot's own seconds for everything but the training.

On a GPU the figures of the two LLaMA-3 shapes with `--quality fast` are compared with the aims of one H100.
"""

import argparse
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from _harness import arguments, interleaved, report
from bench_rotation_step import Problem, reference_step
from rich.filesize import decimal as size_text
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import drot
from drot.calibration.hessian import HessianAccumulator
from drot.checkpoint.manifest import Manifest
from drot.config import OPTIMIZER_DEFAULTS, QUALITIES, Recipe
from drot.core.errors import quoted
from drot.evaluation.timing import Timing
from drot.evaluation.variants import SHAPES
from drot.model.sizes import head_shape

#: shapes that a CPU prunes within minutes, and within a second
OWN_SHAPES: dict[str, dict[str, Any]] = {
    "small": dict(model_type="llama", hidden_size=512, intermediate_size=1792, head_dim=64)
    | dict(num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=16),
    "tiny": dict(model_type="llama", hidden_size=64, intermediate_size=128, head_dim=16)
    | dict(num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2),
}
VOCABULARY = 1024
#: shape → the largest figures that are aimed at on one H100: seconds, and bytes of GPU memory
AIMS = {
    "llama-3-8b": {"one step": 0.010, "training of a layer": 0.8, "whole layer": 5.5, "Hessians": 0.3},
    "llama-3-70b": {"whole layer": 45.0, "peak memory": 30e9},
}
#: tokens of one batch in a measurement of the Hessians alone
BATCH = 8192
PAPER_STEPS = OPTIMIZER_DEFAULTS["paper"][0]
#: the phases that are measured
PHASES = ("load", "weigh", "check", "calibrate", "rotate", "merge", "prune", "recover", "save")


def random_model(config: Any, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """A random model. Its embeddings, the calibration states, have channels of unequal size."""
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
        channels = torch.linspace(0.2, 3, config.hidden_size)
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        embedding.normal_().mul_(channels)
    return model.eval().requires_grad_(False)


def paper_step(config: Any, dtype: torch.dtype, device: str, steps: int) -> float | str:
    """The median seconds of one step of the paper's training; the reason where it does not fit in memory."""
    shape = head_shape(config, 0)
    try:
        problem = Problem(
            config.hidden_size,
            device,
            heads=shape.heads,
            ff=config.intermediate_size,
            kv_heads=shape.kv_heads,
        )
        step = reference_step(problem.cast(dtype))
        return interleaved({"paper": step}, device=device, repeats=steps, warmup=1)["paper"].median
    except torch.OutOfMemoryError as fault:
        return quoted(fault)


def hessian_seconds(config: Any, dtype: torch.dtype, device: str, tokens: int) -> float:
    """The median seconds of the Hessians of a layer's four inputs, without the forward pass."""
    heads = head_shape(config, 0)
    widths = (config.hidden_size, heads.heads * heads.head_dim, config.hidden_size, config.intermediate_size)
    batches = [torch.randn(min(tokens, BATCH), width, dtype=dtype, device=device) for width in widths]

    def hessians() -> None:
        for batch, width in zip(batches, widths, strict=True):
            accumulator = HessianAccumulator(width, device)
            for start in range(0, tokens, BATCH):
                accumulator.add(batch[: tokens - start])
            accumulator.hessian(1)

    return interleaved({"hessians": hessians}, device=device, repeats=3, warmup=1)["hessians"].median


def against_aim(shape: str, name: str, figure: float) -> str:
    """Whether a figure of `shape` is at most the aim, as in '  target 0.8: met'; '' without an aim."""
    aim = AIMS.get(shape, {}).get(name)
    if aim is None:
        return ""
    text = size_text(int(aim)) if name == "peak memory" else f"{aim:g} s"
    return f"  target {text}: {'met' if figure <= aim else 'MISSED'}"


def timing_of(seconds: list[float]) -> Timing:
    cuts = statistics.quantiles(seconds, n=5, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 4
    return Timing(p20=cuts[0], median=statistics.median(seconds), p80=cuts[3])


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(repeats=3)
    cuda = torch.cuda.is_available()
    shapes = SHAPES | OWN_SHAPES
    parser.add_argument("--shape", choices=sorted(shapes), default="llama-3-8b" if cuda else "small")
    parser.add_argument("--nsamples", type=int, default=128 if cuda else 16)
    parser.add_argument("--seqlen", type=int, default=2048 if cuda else 512)
    parser.add_argument("--quality", nargs="+", choices=sorted(QUALITIES), default=["fast"])
    parser.add_argument("--steps", type=int, help="steps of drot's training; default: those of the recipe")
    parser.add_argument("--paper-steps", type=int, default=5, help="steps of the paper's training to measure")
    parser.add_argument("--layers", type=int, default=3, help="layers of the larger model, at least 2")
    options = parser.parse_args()
    if options.layers < 2:
        parser.error("--layers must be 2 or more")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device, on_gpu = options.device, torch.device(options.device).type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    configs = {
        name: AutoConfig.for_model(
            **shapes[options.shape] | dict(num_hidden_layers=count, vocab_size=VOCABULARY)
            | dict(max_position_embeddings=options.seqlen, tie_word_embeddings=False)
        ) for name, count in (("one", 1), ("several", options.layers))
    }  # fmt: skip
    tokens = torch.randint(0, VOCABULARY, (options.nsamples, options.seqlen))
    paper = paper_step(configs["one"], dtype, device, options.paper_steps)
    layers = shapes[options.shape]["num_hidden_layers"]
    with tempfile.TemporaryDirectory(prefix="drot-prune-layer-") as temporary:
        folder = Path(temporary)
        for name, config in configs.items():
            random_model(config, dtype, device).save_pretrained(folder / name)
        for quality in options.quality:
            measure(options, quality, configs["one"], folder, tokens, layers, paper)


def pruned(model: Path, recipe: Recipe, tokens: torch.Tensor, device: str) -> Manifest:
    """The manifest of a run from the folder `model` to a folder that is deleted again."""
    no_tokenizer = SimpleNamespace(save_pretrained=lambda folder: None)
    out = model.with_name("out")
    result = drot.prune(model, recipe, out=out, tokenizer=no_tokenizer, calibration=tokens, device=device)
    shutil.rmtree(out)
    return result.manifest


def measure(
    options: argparse.Namespace,
    quality: str,
    config: Any,
    folder: Path,
    tokens: torch.Tensor,
    layers: int,
    paper: float | str,
) -> None:
    """Prints the figures of one quality, and writes its rows.

    folder: holds the models in `one` and `several`. layers: those of the whole model.
    paper: the seconds of a step of the paper's training, or why it was not measured.
    """
    device, on_gpu = options.device, torch.device(options.device).type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    recipe = Recipe().with_quality(quality)
    if options.steps is not None:
        recipe = recipe.replace(steps=options.steps)
    few = tokens[: max(2, options.nsamples // 16)]
    pruned(folder / "one", recipe.replace(steps=2), few, device)  # warms up
    runs: dict[str, list[Manifest]] = {"one": [], "several": []}
    for _ in range(options.repeats):
        for name in ("several", "one"):  # what the first run takes longer counts for the layers
            runs[name].append(pruned(folder / name, recipe, tokens, device))

    def of_each_layer(values: Callable[[Manifest], float]) -> tuple[Timing, float]:
        """What a layer takes of a figure, by pairs of runs, and the median of what a model takes once."""
        pairs = [*zip(map(values, runs["one"]), map(values, runs["several"]), strict=True)]
        # noise may exceed the difference
        each = [max(several - one, 1e-9) / (options.layers - 1) for one, several in pairs]
        once = [max(one - layer, 0.0) for (one, _), layer in zip(pairs, each, strict=True)]
        return timing_of(each), statistics.median(once)

    phases: dict[str, Timing] = {}
    of_model: dict[str, float] = {}
    for phase in PHASES:
        phases[phase], of_model[phase] = of_each_layer(lambda run, phase=phase: run.seconds.phases[phase])
    layer, once = of_each_layer(lambda run: sum(run.seconds.phases[phase] for phase in PHASES))
    of_several = [record for run in runs["several"] for record in run.layers]
    trainings = [record.rotation for record in of_several if record.rotation is not None]
    trained = len(trainings[0].loss_curve) - 1
    steps = [record.seconds / max(trained, 1) for record in trainings]

    case = f"{options.shape} {dtype}, {options.nsamples} x {options.seqlen} tokens, --quality {quality}"
    training = {f"drot, {trained} steps": phases["rotate"]}
    whole = {"drot": layer}
    if isinstance(paper, float):
        seconds = paper * PAPER_STEPS
        training["paper"] = Timing(seconds, seconds, seconds)
        rest = layer.median - phases["rotate"].median
        whole["paper"] = Timing(seconds + rest, seconds + rest, seconds + rest)
    for what, timings in (("training of a layer", training), ("whole layer", whole)):
        drot_name = next(iter(timings))
        report(
            "prune_layer", f"{what}: {case}", timings,
            peer="paper" if "paper" in timings else drot_name,
            target=drot_name if "paper" in timings else None,
            at_least=12 if on_gpu and what == "whole layer" else 1,
            device=device, save=options.csv,
        )  # fmt: skip
    print()
    if isinstance(paper, float):
        print(
            f"  paper: {PAPER_STEPS} steps, scaled up from the median of {options.paper_steps} "
            f"({paper * 1e3:.1f} ms a step)"
        )
    else:
        print(f"  paper: not measured: {paper}")
    aimed = options.shape if on_gpu and quality == "fast" else ""
    one_step = statistics.median(steps)
    print(f"  one step of drot: {one_step * 1e3:.1f} ms{against_aim(aimed, 'one step', one_step)}")
    for name, seconds in (("training of a layer", phases["rotate"].median), ("whole layer", layer.median)):
        print(f"  {name}: {seconds:.2f} s{against_aim(aimed, name, seconds)}")
    hessians = hessian_seconds(config, dtype, device, tokens.numel())
    print(f"  Hessians of all inputs: {hessians:.3f} s{against_aim(aimed, 'Hessians', hessians)}")
    for phase, timing in phases.items():
        if max(timing.median, of_model[phase]) > 1e-6:
            print(
                f"  {phase:<10} {timing.median:>9.3f} s  {timing.median / layer.median:>4.0%}"
                f"  and {of_model[phase]:.3f} s a model"
            )
    minutes = (layers * layer.median + once) / 60
    print(f"  {layers} layers x {layer.median:.2f} s + {once:.2f} s = {minutes:.1f} minutes a model")
    for kind in ("gpu", "process"):
        peaks = {
            phase: size
            for run in runs["several"]
            for phase, peak in run.peak_memory.items()
            if (size := getattr(peak, kind)) is not None
        }
        if peaks:
            phase = max(peaks, key=peaks.__getitem__)
            aim = against_aim(aimed, "peak memory", peaks[phase]) if kind == "gpu" else ""
            print(f"  peak memory, {kind}: {size_text(peaks[phase])} ({phase}){aim}")


if __name__ == "__main__":
    main()
