"""generate() of 128 tokens: 2:4, with and without rotations, against transformers' dense model.

`1gb` has random weights in the shape of LLaMA: the layers of LLaMA-3.2-1B, eight of them, with an embedding
and a head that have the share of the weights that they have in LLaMA-3-8B, an eighth. `tiny` is the embedded
model, which is so small that starting a product takes about as long as computing it. The smallest weights are
set to zero and the rotations are random, which does not change the time of a token. `8b` is two layers of
LLaMA-3-8B with a small vocabulary, and times what the blocks of R3 cost: 2:4 with them against 2:4.

--compiled times the dense model and the last variant with a compiled decode step too (drot serve --compile).
--llama-cpp runs llama-bench of llama.cpp on GGUF files of the same shape, after the other variants.
"""

import json
import resource
import statistics
import subprocess
import time
from collections.abc import Iterator
from functools import partial

import torch
from _harness import add_processor_time, arguments, clock_of, interleaved, report
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from drot.checkpoint.load import load
from drot.evaluation.speed import weight_bytes
from drot.evaluation.timing import Timing
from drot.evaluation.variants import DENSE, ROTATED, SPARSE, model_variants
from drot.model.compiled import compile_step, compiled_settings
from drot.model.decoder import DecoderModel
from drot.ops import nm_mask
from drot.reporting.demo import MODEL

PROMPT, NEW_TOKENS = 1, 128
#: the block of R3 that the default recipe has
BLOCK = 64
BLOCKS, FULL = "2:4 + blocks", "2:4 + blocks + rotation"
GIGABYTE = "LLaMA shape of 1 GB"
#: what each variant of the model of 1 GB should reach: times as fast as dense, and times the memory
AIMS = {SPARSE: 1.5, BLOCKS: 1.5, FULL: 1.3}
MEMORY = 0.65
#: how fast 2:4 with the blocks of R3 should be at least, against 2:4 without them
WITH_BLOCKS = 1 / 1.03


def random_model(hidden: int, inner: int, layers: int, vocabulary: int) -> PreTrainedModel:
    """A model of LLaMA's kind with 32 heads, in bfloat16."""
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=layers,
        vocab_size=vocabulary,
        max_position_embeddings=2048,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)


@torch.no_grad()
def variants(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """Name → variant: dense, 2:4, with the blocks of R3, and with one rotation a layer too."""
    handle = DecoderModel(model)
    d, dtype = handle.hidden_size, handle.dtype
    for layer in handle.layers:
        for linear in layer.linears.values():
            linear.weight.masked_fill_(nm_mask(linear.weight.abs(), 2, 4), 0)
        for part in layer.expect_down_rotation(BLOCK):
            part.weight.normal_(0, BLOCK**-0.5)
    found = model_variants(model)
    found[BLOCKS] = found.pop(ROTATED)
    for layer in handle.layers[:-1]:
        layer.expect_boundary("residual").weight.normal_(0, d**-0.5)
    found[FULL] = model_variants(model)[ROTATED]
    assert all(variant.dtype == dtype for variant in found.values())
    return found


def llama_cpp(program: str, file: str, options) -> tuple[str, Timing, float]:
    """The name of a GGUF file's format, the time of its tokens by llama-bench, and MiB of its weights."""
    command = [program, "-m", file, "-t", str(options.threads), "-p", "0", "-n", str(NEW_TOKENS)]

    def run(repeats: int) -> tuple[dict, float]:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        asked = [*command, "-r", str(repeats), "-o", "jsonl"]
        done = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        computed = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return json.loads(done.stdout.splitlines()[-1]), computed

    found, computed = run(1 + options.repeats)
    seconds = [each / 1e9 for each in found["samples_ns"][1:]]
    if options.processor_time:  # without those of loading and of the warm-up
        seconds = [(computed - run(1)[1]) / options.repeats]
    cuts = statistics.quantiles(seconds, n=5, method="inclusive") if len(seconds) > 1 else seconds * 4
    timing = Timing(cuts[0], statistics.median(seconds), cuts[3])
    return f"llama.cpp {found['model_type'].split()[-1]}", timing, found["model_size"] / 2**20


def with_compiled(found: dict[str, PreTrainedModel]) -> Iterator[tuple[str, PreTrainedModel, dict]]:
    """The name, the model and the settings of `generate` of the variants that are compiled."""
    for name in (DENSE, list(found)[-1]):
        start, computed = time.perf_counter(), time.process_time()
        cuda_graph = found[name].device.type == "cuda"
        compile_step(found[name], cuda_graph=cuda_graph)
        seconds, computed = time.perf_counter() - start, time.process_time() - computed
        print(f"  {name} compiled in {seconds:.1f} s, {computed:.1f} s of drot's own processor time")
        yield (
            f"{name}, compiled",
            found[name],
            compiled_settings(PROMPT + NEW_TOKENS, None, cuda_graph=cuda_graph),
        )


def bench(name: str, model: PreTrainedModel, aims: dict[str, float], options, peer: str = DENSE) -> None:
    """Prints the rows of a model, and with --csv appends them. With another peer, only it and `aims`."""
    found = variants(model)
    if peer != DENSE:
        found = {each: found[each] for each in (peer, *aims)}
    prompt = torch.randint(model.config.vocab_size, (1, PROMPT), device=model.device)
    settings = dict(attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0)
    length = dict(min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS)
    calls = {name: partial(variant.generate, prompt, **settings, **length) for name, variant in found.items()}
    if options.compiled:
        for each, variant, compiled in with_compiled(found):
            calls[each] = partial(variant.generate, prompt, **settings, **length, **compiled)
    timings = interleaved(
        calls, device=options.device, repeats=options.repeats, warmup=1, clock=options.clock
    )
    memory = {name: weight_bytes(variant, "model") / 2**20 for name, variant in found.items()}
    memory |= {name: memory[name.removesuffix(", compiled")] for name in calls}
    if options.llama_cpp and name == GIGABYTE:
        program, *files = options.llama_cpp
        for file in files:
            kind, timing, mib = llama_cpp(program, file, options)
            timings[kind], memory[kind] = timing, mib
    report(
        "generate",
        f"{name}, {NEW_TOKENS} tokens, {str(model.dtype).removeprefix('torch.')}"
        + ", processor time" * options.processor_time,
        timings,
        peer=peer,
        aims=aims,
        columns={
            name: {"tokens_per_second": f"{NEW_TOKENS / timing.median:.2f}", "mib": f"{memory[name]:.0f}"}
            for name, timing in timings.items()
        },
        device=options.device,
        save=options.csv,
    )
    for name in aims if peer == DENSE else ():
        share = memory[name] / memory[DENSE]
        print(
            f"  {name:<28} {share:.3f} of the memory, at most {MEMORY}: "
            f"{'met' if share <= MEMORY else 'MISSED'}"
        )


def main() -> None:
    parser = arguments(__doc__)
    models = ["1gb", "8b", "tiny"]
    parser.add_argument("--model", choices=models, nargs="*", default=models)
    dtypes = ["bfloat16", "float16", "float32"]
    parser.add_argument("--dtype", choices=dtypes, nargs="*", default=["bfloat16", "float32"], help="of tiny")
    add_processor_time(parser)
    parser.add_argument("--compiled", action="store_true", help="time a compiled decode step too")
    parser.add_argument(
        "--llama-cpp", nargs="+", metavar="PATH", help="llama-bench, and GGUF files of the shape of 1gb"
    )
    options = parser.parse_args()
    options.clock = clock_of(options, parser)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if "1gb" in options.model:
        bench(GIGABYTE, random_model(2048, 8192, 8, 16384).to(options.device), AIMS, options)
    if "8b" in options.model:
        model = random_model(4096, 14336, 2, 1024).to(options.device)
        bench("two layers of LLaMA-3-8B", model, {BLOCKS: WITH_BLOCKS}, options, peer=SPARSE)
    if "tiny" in options.model:
        for dtype in options.dtype:
            model = load(MODEL, device=options.device, dtype=dtype)
            bench("tiny-llama", model, {SPARSE: 1.0}, options)


if __name__ == "__main__":
    main()
