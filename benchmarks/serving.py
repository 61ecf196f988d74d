"""A stress test of `drot serve`: clients at once, some of which cancel their request or send a malformed one.

It starts the server as a process, sends all requests in each of several rounds, and fails unless each
request has the answer that it should have, the server is healthy afterwards, and its memory stays flat: after
the last round it is at most 1 % larger than after any round before. The first round fills the pages of the
cache and the arenas of the C library.
"""

import argparse
import concurrent.futures
import contextlib
import datetime
import json
import random
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import openai
import torch
from _harness import add_csv, append_rows, commit, machine

from drot.reporting.demo import MODEL

PROMPTS = ["def main(", "import os\n", "class A:\n", "for i in range(", "return ", "with open(", "try:\n"]
MALFORMED = [
    {"prompt": 5},
    {"prompt": "x", "max_tokens": 0},
    {"prompt": "x", "n": 9},
    {"prompt": "x " * 99999},
]
#: The memory of the cache is taken page by page, as requests use it. The first round uses so many tokens.
CACHE_TOKENS = 4096
#: the most by which the memory after the last round may exceed that after the rounds before
GROWTH = 0.01


@contextlib.contextmanager
def server(model: str, options: list[str]) -> Iterator[tuple[str, int]]:
    """The address of `drot serve` as a process, and its process id."""
    names = ["--port", "0", "--name", "served", "--cache-tokens", str(CACHE_TOKENS)]
    command = [sys.executable, "-m", "drot", "serve", model, *names, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split(" at ")[1].split()[0], process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def resident(pid: int) -> float:
    """MiB of memory that a process has now."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def send(client: openai.OpenAI, kind: str, number: int, tokens: int) -> tuple[str, int, float]:
    """What became of a request, the tokens of its answer, and its seconds."""
    start = time.perf_counter()
    prompt, ask = PROMPTS[number % len(PROMPTS)], client.completions.create
    made = 0
    try:
        if kind == "malformed":
            client.post("/completions", body=MALFORMED[number % len(MALFORMED)], cast_to=object)
            return "accepted", 0, 0.0
        if kind == "cancelled" or number % 2:
            stream = ask(model="served", prompt=prompt, max_tokens=tokens, stream=True)
            for part in stream:
                made = part.usage.completion_tokens if part.usage else made + 1
                if kind == "cancelled" and made == 3:
                    stream.close()
                    return kind, made, time.perf_counter() - start
        else:
            answer = ask(model="served", prompt=prompt, max_tokens=tokens)
            assert answer.usage is not None
            made = answer.usage.completion_tokens
        done = kind if made else "empty"
    except openai.APIStatusError as error:
        refused = kind == "malformed" and 400 <= error.status_code < 500
        done = kind if refused else f"status {error.status_code}"
    except openai.APIError as error:
        done = type(error).__name__
    return done, made, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(MODEL))
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--cancelled", type=int, default=10)
    parser.add_argument("--malformed", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3, help="all requests are sent so many times")
    parser.add_argument("--sequential", action="store_true", help="as of drot serve")
    parser.add_argument("--device", default="cpu", help="as of drot serve")
    add_csv(parser)
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds must be at least 2: the first fills what later ones use")
    good = options.requests - options.cancelled - options.malformed
    expected = {"answered": good, "cancelled": options.cancelled, "malformed": options.malformed}
    kinds = [kind for kind, count in expected.items() for _ in range(count)]
    random.Random(0).shuffle(kinds)
    expected = {kind: count * options.rounds for kind, count in expected.items()}
    given = ["--device", options.device, *["--sequential"] * options.sequential]
    with server(options.model, given) as (address, pid):
        client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=600)
        memory, results, start = [resident(pid)], [], time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(options.clients) as pool:
            for _ in range(options.rounds):
                sent = [
                    pool.submit(send, client, kind, number, options.tokens)
                    for number, kind in enumerate(kinds)
                ]
                results += [each.result() for each in sent]
                memory.append(resident(pid))
        seconds = time.perf_counter() - start
        with urllib.request.urlopen(address.removesuffix("/v1") + "/health", timeout=60) as answer:
            healthy = json.load(answer)["status"] == "ok"
    found = Counter(done for done, _, _ in results)
    answered = [time for done, _, time in results if done == "answered"]
    row = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": machine(options.device),
        "threads": torch.get_num_threads(),
        "model": Path(options.model).name,
        "way": "sequential" if options.sequential else "batch",
        "clients": options.clients,
        "requests": options.requests * options.rounds,
        **{name: found[name] for name in expected},
        "lost": options.requests * options.rounds - sum(found[name] for name in expected),
        "tokens_per_second": f"{sum(made for _, made, _ in results) / seconds:.1f}",
        "median_s": f"{statistics.median(answered):.2f}",
        "slowest_s": f"{max(answered):.2f}",
        "mib": " ".join(f"{each:.0f}" for each in memory),
    }
    for name, value in row.items():
        print(f"{name:<18} {value}")
    if options.csv is not None:
        append_rows(options.csv / "serve.csv", [row])
    flat = memory[-1] <= max(memory[1:-1]) * (1 + GROWTH)
    if found != Counter(expected) or not healthy or not flat:
        sys.exit(f"FAILED: got {dict(found)}, expected {expected}; healthy: {healthy}; memory flat: {flat}")


if __name__ == "__main__":
    main()
