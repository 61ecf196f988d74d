"""The minutes of `drot prune` on one H100, counted on tensors without storage. No GPU is needed.

    python benchmarks/minutes.py --csv                        LLaMA-3-8B and 70B in all qualities
    python benchmarks/minutes.py --shape llama-3-8b --ops 20  with the ops of a layer that take longest
    python benchmarks/minutes.py --ranks 8 --quality balanced  of each of 8 GPUs that share the run

counting.py counts a run: what its ops, its copies between the memories and its files take at RATES. With
several ranks, what a rank would send is counted in place of sent: as rings of all GPUs do, over NVLink within
a machine of 8 GPUs, and over the adapters of the network between machines. Several ranks train with
--hessians dense, so that each trains the rotations of other layers.

An op takes the longest of three times at RATES: its operations, the bytes that it reads and writes, and its
launch. Files are read and written by threads; a run waits for them as far as they take longer than its work
(`waits`). A file comes from the disk once, and then from the main memory of the machine, if it has room.

A run of one layer and a run of two give what a layer costs and what lies beside the layers. A run of a rank
that trains no rotation gives what a training costs. ADMM takes USUAL_ADMM_ITERATIONS, and no training stops
early. tests/pipeline/test_minutes.py compares the operations with those of a run on a CPU, and
tests/second_device/test_traffic.py the copies with those of a run on a device that is not the CPU.
"""

import argparse
import datetime
import math
from collections import Counter
from typing import Any

import torch
from counting import (
    DISK,
    GPU_MEMORY,
    GPUS_OF_A_MACHINE,
    HASH,
    HOST,
    HOST_MEMORY,
    HOST_TRAFFIC,
    LAUNCH,
    MEMORY,
    PINNED,
    RATES,
    CountedRanks,
    counted_run,
)
from transformers import AutoConfig, AutoModelForCausalLM

from drot.checkpoint.pieces import READERS
from drot.checkpoint.resume import HASHERS
from drot.config import QUALITIES, Recipe, resolve
from drot.config.recipe import DISTILL_TEXT
from drot.core.hashes import WHOLE_HASH_BYTES
from drot.evaluation.variants import SHAPES
from drot.machine.ranks import ALONE
from drot.machine.transfer import pinned_bytes
from drot.model.decoder import DecoderModel
from drot.pipeline.distill import USED_SHARE
from drot.pipeline.memory import distillation_memory
from drot.pipeline.sizes import sizes_of, without_weights
from drot.pipeline.watch import STEPS
from drot.pipeline.weigh import KEPT_SHARE, kept_layers

#: Seconds until the first step: imports (6 on the machine of the tests), the text, the first use of the GPU.
#: A whole run of tiny-llama took 7.6 seconds on an H200 after the imports (results/tiny_llama.csv, `fast`).
START = 12.0
#: model, number of ranks → the minutes that are wanted of `balanced`, and the efficiency: the time of one
#: rank over that of all ranks together
WANTED_OF_RANKS = {
    ("llama-3-70b", 8): (10.0, 0.8),
    ("llama-3-70b", 32): (None, 0.6),
    ("llama-3-405b", 8): (60.0, 0.8),
    ("llama-3-405b", 32): (None, 0.6),
}
#: model → quality → the minutes that are wanted
WANTED = {
    "llama-3-8b": {"fast": 2.0, "balanced": 4.0, "best": 7.0},
    "llama-3-70b": {"fast": 25.0, "balanced": 50.0, "best": 84.0},
}


def waits(disk: float, work: float, *threads: tuple[float, float]) -> float:
    """The seconds that a run waits for threads which need longer than its work.

    disk: bytes a second of the disk, which the threads share.
    threads: of each, the bytes that it reads from the disk or writes to it, and its seconds for all else.
    """
    alone = [size / disk + other for size, other in threads]
    return max(0.0, max(alone) - work, sum(size for size, _ in threads) / disk - work)


class OfLayer:
    """What a layer costs, from counted runs of one layer and of two.

    Attributes:
        ops: (step, op) → seconds of a layer; `("send", "all")` of what is sent.
        training: the same of the training on this rank of one known rotation.
        before: the seconds of `ops` and of `training` before the check of known rotations.
        first: (step, op) → seconds of a run without layers.
        layers_ahead: as in Costs.
        copied: bytes that go between the memories while a run waits. overlapping: step → those that go while
            it computes.
        written, home, ahead: as in CountedFiles.
        peak: the most bytes that tensors took on the GPU of rank 0, in a run of two layers.
    """

    def __init__(self, shape: str, recipe: Any, tokens: torch.Tensor, size: int, adapters: int) -> None:
        self._shape, self._recipe, self._tokens = shape, recipe, tokens
        self._size, self._adapters = size, adapters
        self._values: list[Any] = []
        # with --hessians dense a rank trains every n-th layer; rank 1 trains none of a single layer
        two, two_before, copies_of_two, files_of_two = self._counted(2)
        self.peak = self._peak
        one, one_before, copies_of_one, files_of_one = self._counted(1)
        other, other_before = self._counted(1, rank=1)[:2] if size > 1 else (one, one_before)
        self.ops, self.training, self.first = two.copy(), one.copy(), one.copy()
        self.ops.subtract(one)
        self.training.subtract(other)
        self.first.subtract(self.ops)
        self.first.subtract(self.training)
        self.before = two_before - one_before, one_before - other_before
        self.copied = copies_of_two[0] - copies_of_one[0]
        self.overlapping = copies_of_two[1].copy()
        self.overlapping.subtract(copies_of_one[1])
        self.written = files_of_two.written - files_of_one.written
        self.home = files_of_two.home - files_of_one.home
        self.ahead = files_of_two.ahead - files_of_one.ahead

    def _counted(
        self, layers: int, rank: int = 0
    ) -> tuple[Counter[tuple[str, str]], float, tuple[float, Counter[str]], Any]:
        """The seconds of a run by step and op, those before the check, the bytes it copies, and its files."""
        config = SHAPES[self._shape] | {"num_hidden_layers": layers}
        sizes = AutoConfig.for_model(**config, max_position_embeddings=self._tokens.shape[1])
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(sizes, dtype=torch.bfloat16)
        self._values[:] = self._values if rank else []
        ranks = CountedRanks(rank, self._size, self._values, self._adapters) if self._size > 1 else ALONE
        costs, files = counted_run(model.eval().requires_grad_(False), self._recipe, self._tokens, ranks)
        self._peak = max(costs.peak.values())
        found, self.layers_ahead = costs.seconds.copy(), costs.layers_ahead
        if isinstance(ranks, CountedRanks):
            found["send", "all"] = ranks.seconds
        before = sum(costs.before.values()) if self._size > 1 else 0.0
        copied = sum(costs.copied.values()) - sum(costs.overlapping.values())
        return found, before, (copied, costs.overlapping), files


def minutes_of(
    shape: str,
    quality: str,
    nsamples: int,
    seqlen: int,
    size: int = 1,
    host_memory: float = HOST_MEMORY,
    steps: int | None = None,
    disk: float = DISK,
    adapters: int = GPUS_OF_A_MACHINE,
) -> tuple[dict[str, float], Counter[tuple[str, str]], int]:
    """Step → seconds of a layer; the seconds of its ops; and the most bytes that tensors took on a GPU.

    size: the number of ranks. host_memory: bytes of main memory for each GPU. steps: of the training of a
    rotation; None for those of the quality. disk: bytes a second that the disk of a machine reads or writes.
    adapters: of the network, in each machine.

    The step `copies` is what a run waits for copies and files, as far as no work hides them; `send` is what
    the ranks send; `beside` is of the whole run, and not of a layer.
    """
    dense, config = size > 1, SHAPES[shape]
    asked = Recipe().replace(mode="layer", hessians="dense" if dense else "sequential", steps=steps)
    recipe = resolve(
        asked.with_quality(quality),
        device="cuda",
        positions=seqlen,
        down_width=config["intermediate_size"],
        tokens=(nsamples, seqlen),
        distillation=DISTILL_TEXT * nsamples,
    )
    if not _fits_together(shape, recipe, nsamples, seqlen):
        recipe = resolve(recipe, device="cuda", positions=seqlen, tokens=(nsamples, seqlen))
    count = config["num_hidden_layers"]
    layer = OfLayer(shape, recipe, torch.zeros(nsamples, seqlen, dtype=torch.long), size, adapters)
    trained = math.ceil(count / size) / count if dense else 0.0  # of the layers, by this rank
    ops = Counter({k: layer.ops[k] + trained * layer.training[k] for k in layer.ops | layer.training})
    seconds = dict.fromkeys(STEPS[1:], 0.0)  # the first is `load`
    for (step, _), value in ops.items():
        if step in seconds:
            seconds[step] += value
    # a run of two layers keeps the inputs of all; a whole run may compute them again (pipeline/weigh.py)
    states = 2 * nsamples * seqlen * config["hidden_size"] / size
    room = int(KEPT_SHARE * host_memory / pinned_bytes(int(states)))
    first, _ = kept_layers(count, room)
    passes = 2 + first / count
    seconds["weigh"] *= (1 + passes) / 3
    weights, head = config["hidden_size"] * 3 * config["intermediate_size"], config["head_dim"]
    heads = 2 * (config["num_attention_heads"] + config["num_key_value_heads"])
    bytes_read = 2 * (weights + config["hidden_size"] * head * heads)
    model = count * bytes_read
    ends = 2 * 2 * config["vocab_size"] * config["hidden_size"]
    # where the inputs of layers leave room, the system keeps the files in memory, and they are read there
    gpus = min(size, GPUS_OF_A_MACHINE)
    stays = gpus * (host_memory - states * min(room, count)) >= model + ends
    # READERS threads read pieces from there into pinned memory, while others go to the GPU: each byte passes
    # the main memory three times
    rate = min(READERS * HOST, PINNED, HOST_TRAFFIC / gpus / 3)
    from_disk = bytes_read, 0.0
    again = (0.0, bytes_read / rate) if stays else from_disk
    hashed = model + ends <= WHOLE_HASH_BYTES  # the files are read for the hash, before anything else
    written, rotation = layer.written["layer"], layer.written["rotation"]
    work = sum(seconds.values()) - seconds["weigh"] - seconds["distill"]
    hidden = {step: size / PINNED - seconds.get(step, 0.0) for step, size in layer.overlapping.items()}
    seconds["copies"] = layer.copied / HOST + sum(max(0.0, rest) for rest in hidden.values())
    seconds["send"] = ops["send", "all"]
    first_read = again if hashed else from_disk
    size_read, other = (once + (passes - 1) * more for once, more in zip(first_read, again, strict=True))
    seconds["copies"] += waits(disk, seconds["weigh"], (size_read, other))
    if hashed:
        seconds["copies"] += bytes_read / disk
    # a thread reads the next layer and copies it to the GPU; another copies the layer before home and writes
    # it; a third hashes the layer before that
    reader, writer = again, (written, layer.home / HOST)
    # a layer is hashed while the next is written; the next but one is written when that hash is known
    hasher = 0.0, (waits(disk, 0.0, writer) + written / HASH) / 2
    of_rotation = max(rotation / disk, rotation / HASH / HASHERS)  # in a batch
    beside = waits(disk, 0.0, writer) + written / HASH  # of the last layer
    if dense:
        of_pass, of_training = layer.before[0], trained * layer.before[1]
        # some layers of a batch are read while the batch before is trained, the others while it is calibrated
        late = (1 - layer.layers_ahead / size) * waits(disk, of_pass, reader)
        training = of_pass + of_training
        rotations = (rotation, 0.0), (0.0, rotation / HASH / HASHERS)
        seconds["copies"] += max(late, waits(disk, training, reader, *rotations))
        work -= training
        read_ahead = layer.ahead, layer.ahead / HASH
        seconds["copies"] += waits(disk, work, reader, writer, hasher, read_ahead)
        # the last batch of rotations is written while the first layer is pruned; a run waits for the first
        # rotation, and for those of the embedding and the head
        beside += max(0.0, size * of_rotation - work) + 3 * (rotation / disk + rotation / HASH)
    else:
        seconds["copies"] += waits(disk, work, reader, writer, hasher)
    # the ends are read twice and written, copied there and back, and hashed
    beside += START + sum(layer.first.values()) + ends * (3 / disk + 2 / HOST + 1 / HASH)
    if recipe.recovery.distill_epochs:  # the layers are read once more, and a thread writes them
        seconds["copies"] += waits(disk, 0.0, again) + waits(disk, 0.0, writer, hasher)
    seconds["beside"] = beside
    return seconds, ops, layer.peak


def _fits_together(shape: str, recipe: Any, nsamples: int, seqlen: int) -> bool:
    """Whether the GPU has room for the training of all layers together."""
    config = AutoConfig.for_model(**SHAPES[shape], max_position_embeddings=seqlen)
    sizes = sizes_of(DecoderModel(without_weights(config)), nsamples, seqlen)
    return distillation_memory(sizes, recipe, torch.bfloat16) <= USED_SHARE * GPU_MEMORY


def main() -> None:
    from _harness import add_csv, append_rows, commit  # not above: a test takes `Costs` without this folder

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=sorted(WANTED, reverse=True))
    parser.add_argument("--quality", nargs="+", choices=sorted(QUALITIES), default=list(QUALITIES))
    parser.add_argument("--nsamples", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--ranks", nargs="+", type=int, default=[], help="numbers of GPUs; writes scale.csv")
    parser.add_argument("--steps", type=int, help="training steps; default: those of the quality")
    parser.add_argument("--host-memory", type=float, default=HOST_MEMORY / 1e9, help="GB for each GPU")
    parser.add_argument("--disk", type=float, default=DISK / 1e9, help="GB/s of the disk of a machine")
    parser.add_argument(
        "--adapters", type=int, default=GPUS_OF_A_MACHINE, help="adapters of the network in each machine"
    )
    parser.add_argument("--ops", type=int, default=0, help="how many ops of a layer are named")
    add_csv(parser)
    options = parser.parse_args()
    rates = ", ".join(f"{name} {rate / 1e12:g}" for name, rate in RATES.items())
    print(f"TFLOP/s: {rates}; memory {MEMORY / 1e12:g} TB/s, main memory {HOST / 1e9:g} GB/s,")
    print(f"disk {options.disk:g} GB/s, SHA-256 {HASH / 1e9:g} GB/s, an op at least {LAUNCH * 1e6:g} us")
    for shape in options.shape:
        for quality in options.quality:
            alone = None
            for ranks in sorted({1, *options.ranks}):
                seconds, ops, peak = minutes_of(
                    shape, quality, options.nsamples, options.seqlen, ranks, 1e9 * options.host_memory,
                    options.steps, 1e9 * options.disk, options.adapters,
                )  # fmt: skip
                row = {"model": shape, "quality": quality, **show(shape, quality, ranks, seconds)}
                fits = "fit" if peak <= GPU_MEMORY else "DO NOT FIT"
                print(f"  tensors take {peak / 1e9:.0f} GB of a GPU: they {fits} into {GPU_MEMORY / 1e9:.0f}")
                if not options.ranks:
                    del row["send"]
                for (step, name), value in ops.most_common(options.ops):
                    print(f"    {step:<10} {name:<36} {value:8.3f} s")
                if options.ranks:
                    alone = alone or float(row["minutes"])
                    row |= compared(shape, quality, ranks, float(row["minutes"]), alone)
                    row |= {
                        "disk": f"{options.disk:g}",
                        "adapters": options.adapters if ranks > GPUS_OF_A_MACHINE else "",
                    }
                if options.csv is not None:
                    today = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
                    file = "scale.csv" if options.ranks else "minutes.csv"
                    append_rows(options.csv / file, [{"date": today, "commit": commit()} | row])


def show(shape: str, quality: str, ranks: int, seconds: dict[str, float]) -> dict[str, Any]:
    """Prints the seconds of a layer and the minutes of a run; returns them as a row."""
    layers, beside = SHAPES[shape]["num_hidden_layers"], seconds["beside"]
    layer = sum(seconds.values()) - beside
    minutes, wanted = (layers * layer + beside) / 60, WANTED.get(shape, {}).get(quality)
    verdict = "" if wanted is None or ranks > 1 else "met" if minutes <= wanted else "MISSED"
    print(f"\n{shape} {quality}, {ranks} GPU: {minutes:.1f} minutes; wanted of one: {wanted} {verdict}")
    print(f"  {layers} layers x {layer:.2f} s, {beside:.0f} s beside")
    for step, value in seconds.items():
        print(f"  {step:<10} {value:8.2f} s")
    shown = {step: f"{value:.2f}" for step, value in seconds.items()}
    return {**shown, "layers": layers, "minutes": f"{minutes:.1f}", "wanted": wanted, "verdict": verdict}


def compared(shape: str, quality: str, ranks: int, minutes: float, alone: float) -> dict[str, Any]:
    """The entries of a row that compare several ranks with one, which takes `alone` minutes."""
    efficiency = alone / ranks / minutes
    of_ranks = WANTED_OF_RANKS.get((shape, ranks), (None, None)) if quality == "balanced" else (None, None)
    met = [minutes <= of_ranks[0]] if of_ranks[0] is not None else []
    met += [efficiency >= of_ranks[1]] if of_ranks[1] is not None else []
    verdict = "" if not met else "met" if all(met) else "MISSED"
    print(f"  {efficiency:.0%} of the time of {ranks} GPUs is not lost; wanted {of_ranks}: {verdict}")
    return {
        "ranks": ranks,
        "wanted": of_ranks[0],
        "efficiency": f"{efficiency:.2f}",
        "wanted_efficiency": of_ranks[1],
        "verdict": verdict,
    }


if __name__ == "__main__":
    main()
