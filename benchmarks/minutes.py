"""The minutes of `drot prune` on one H100, counted on tensors without storage. No GPU is needed.

    python benchmarks/minutes.py --csv                        LLaMA-3-8B and 70B in all qualities
    python benchmarks/minutes.py --shape llama-3-8b --ops 20  with the ops of a layer that take longest
    python benchmarks/minutes.py --ranks 8 --quality balanced  of each of 8 GPUs that share the run

The run is the code of `drot prune` on the device `meta`, as on a GPU: a mode sees every op with its shapes.
With several ranks, what a rank would send is counted in place of sent: as a ring of all GPUs does, over
NVLink within a machine of 8 GPUs, and over the network between machines. Several ranks train with --hessians
dense, so that each trains the rotations of other layers.

An op takes the longest of three times at RATES: its operations, the bytes that it reads and writes, and its
launch. What goes between the memories and to the disk is added by formula (`copied_bytes`).

A run of one layer and a run of two give what a layer costs and what lies beside the layers. A run of a rank
that trains no rotation gives what a training costs. ADMM takes
USUAL_ADMM_ITERATIONS, no training stops early, and every epoch of the recovery is the best so far.
tests/pipeline/test_minutes.py compares the operations with those of a run on a CPU, and
tests/second_device/test_traffic.py the copies with those of a run on a device that is not the CPU.
"""

import argparse
import contextlib
import datetime
import importlib
import math
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx.experimental import _config
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from drot.calibration import cholesky, hessian, layer_pass, stream
from drot.config import QUALITIES, Recipe, ResolvedRecipe, resolve
from drot.core.hashes import WHOLE_HASH_BYTES
from drot.evaluation.variants import SHAPES
from drot.machine.ranks import ALONE, Ranks
from drot.model.decoder import DecoderModel
from drot.pipeline import events, invariance, recover
from drot.pipeline import run as run_module
from drot.pipeline.context import RunContext
from drot.pipeline.estimate import FAST_PRODUCTS, USUAL_ADMM_ITERATIONS
from drot.pipeline.run import PruningRun
from drot.pruning import solve

#: What one H100 (SXM) reaches. Operations a second of large products by their precision: 798 TFLOP/s in bf16,
#: and about the others, are what others have measured. The rates of what is no product are estimates: the
#: factor of a block, a triangular solve, QR, and the sweep of SparseGPT within a block.
RATES = {"bf16": 798e12, "tf32": 350e12, "fp32": 50e12, "fp64": 50e12}
RATES |= {"factor": 2e12, "solve": 25e12, "qr": 1e12, "sweep": 5e12}
#: bytes a second of its memory, as others have measured; estimates between it and pageable main memory, of
#: the disk, and of SHA-256 on one core
MEMORY, HOST, DISK, HASH = 3.0e12, 6e9, 2e9, 1e9
#: bytes a second between the memory of a GPU and pinned main memory, an estimate
PINNED = 25e9
#: seconds of an op with its launch in Python, and of a value that the host reads
LAUNCH, WAIT = 10e-6, 30e-6
#: seconds until a collective call begins to send: between machines, and within; and of a number or an object,
#: which the CPUs send. Estimates.
LATENCY, MESSAGE = (60e-6, 30e-6), 0.5e-3
#: seconds until the first step: imports, the text, the first use of the GPU
START = 20.0
#: its bytes of memory, by which a run decides what stays there
GPU_MEMORY = 80e9
#: bytes a second that a rank sends to another: over NVLink to one of its machine, or over the network
NVLINK, NETWORK, GPUS_OF_A_MACHINE = 400e9, 50e9, 8
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
aten, drot_ops = torch.ops.aten, torch.ops.drot
PRODUCTS = (aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.addmm_, aten.baddbmm_)
#: ops that launch nothing
FREE = (aten._unsafe_view, aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.detach)
#: ops that read as much of their first argument as they write
GATHERS = (aten.index, aten.embedding)
#: ops that do not read their first argument
WRITES = (aten.copy_, aten.zero_, aten.fill_, aten.zeros_like, aten.ones_like)


class CountedRanks(Ranks):
    """A rank of several that do the same at the same time. It counts the seconds in which it would send.

    values: what `on_rank` gave to rank 0 in the same run, for another rank; rank 0 writes it there.
    """

    def __init__(self, rank: int, size: int, values: list[Any], machine: bool = False) -> None:
        super().__init__(rank, size, rank % GPUS_OF_A_MACHINE)
        self._waited, self._values = 0.0, values
        self._coming = iter(list(values)) if rank else None
        if size > GPUS_OF_A_MACHINE and not machine:
            self.of_machine = CountedRanks(self.local_rank, GPUS_OF_A_MACHINE, [], machine=True)

    def _send(self, size: float) -> None:
        inside = self.size <= GPUS_OF_A_MACHINE
        self._waited += LATENCY[inside] + size / (NVLINK if inside else NETWORK)

    def _reduce(self, tensor: Tensor) -> None:
        self._send(2 * self._of_others * tensor.nbytes)

    def _gathered(self, rows: Tensor) -> list[Tensor]:
        self._send((self.size - 1) * rows.nbytes)
        return [torch.empty_like(rows) for _ in range(self.size)]

    def total(self, value: float) -> float:
        self._waited += MESSAGE
        return value * self.size

    def each(self, value: Any) -> list[Any]:
        self._waited += MESSAGE
        return [value] * self.size

    def on_rank(self, rank: int, function: Any) -> Any:
        result = function()
        if self._coming is not None:
            result = next(self._coming)
        else:
            self._values.append(result)
        self._waited += MESSAGE
        for tensor in _tensors(result):  # to the GPU of the sender, and home from those of the others
            self._send(self._of_others * tensor.nbytes)
            self._waited += 2 * tensor.nbytes / HOST
        return result

    def same(self, tensors: Any) -> bool:
        return True

    @property
    def _of_others(self) -> float:
        return (self.size - 1) / self.size

    @property
    def seconds(self) -> float:
        machine: Any = self.of_machine
        return self._waited + (0.0 if machine is self else machine.seconds)


class Costs(TorchDispatchMode):
    """Counts the seconds of the ops at RATES, by `step` and by name.

    The values that the host reads of a tensor on `meta` fall slowly, as a loss does; those of integers are 0.

    device: where the run computes. step: where the next ops count.
    operations: (step, precision) → operations. copied: bytes that went to `device` or came from it.
    peak: step → the most bytes that the tensors on `device` took at once.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.step = device, ""
        self.seconds: Counter[tuple[str, str]] = Counter()
        self.operations: Counter[tuple[str, str]] = Counter()
        self.launches: Counter[str] = Counter()
        self.copied: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._living: dict[int, tuple[StorageWeakRef, int]] = {}
        self._taken = 0
        self._read = 0.5

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket
        result = self._called(func, args, kwargs)
        self._hold(_tensors([args, result]))
        if func.is_view or name in FREE:
            return result
        given = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
        unread = {a.name for a in func._schema.arguments if a.is_out}
        if name in WRITES:
            unread.add(func._schema.arguments[0].name)
        read = _tensors([value for key, value in given.items() if key not in unread])
        written = _tensors([result, *(given[key] for key in unread if key in given)])
        size = _bytes(written) + _bytes(written if name in GATHERS else read)
        if (
            name in PRODUCTS
            and kwargs.get("out", result) is not args[0]
            and name in (aten.addmm, aten.baddbmm)
        ):
            size += 2 * _bytes(_tensors(result))  # a copy of the matrix to which it adds
        precision, work = operations_of(name, read, args)
        types_of = {tensor.device.type for tensor in _tensors([args, result])}
        if name in (aten.copy_, aten._to_copy) and len(types_of) > 1 and self.device.type in types_of:
            self.copied[self.step] += _bytes(_tensors(result))
        self.operations[self.step, precision] += work
        self.launches[self.step] += 1
        seconds = max(work / RATES.get(precision, 1), size / MEMORY, LAUNCH)
        self.seconds[self.step, str(name)] += seconds + (WAIT if name is aten._local_scalar_dense else 0)
        return result

    def _hold(self, tensors: list[Tensor]) -> None:
        """Counts the memory of the tensors on `device`. Looks for memory that is free again at a new peak."""
        for tensor in tensors:
            if tensor.device == self.device:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._living or self._living[storage._cdata][0].expired():
                    self._taken += storage.nbytes() - self._living.get(storage._cdata, (None, 0))[1]
                    self._living[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if self._taken > self.peak[self.step]:
            self._living = {key: each for key, each in self._living.items() if not each[0].expired()}
            self._taken = sum(size for _, size in self._living.values())
            self.peak[self.step] = max(self.peak[self.step], self._taken)

    def _called(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of an op; torch has no shapes of products with `out_dtype`, and no values on `meta`."""
        if not any(t.is_meta for t in _tensors([args, kwargs])):
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            self._read *= 1 - 1e-5
            return self._read if args[0].is_floating_point() else args[0].dtype == torch.bool
        if func is aten._to_copy.default and args[0].is_meta and kwargs.get("device") == torch.device("cpu"):
            self._read *= 1 - 1e-5
            value = self._read if args[0].is_floating_point() else 0
            return torch.full(args[0].shape, value, dtype=kwargs.get("dtype") or args[0].dtype)
        if func is aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            return args[0]
        if func.overloadpacket is aten._fused_adam_:
            return None
        if func is aten.bincount.default:
            return args[0].new_empty(args[2] if len(args) > 2 else kwargs["minlength"])
        if func is aten.bmm.dtype:
            return args[0].new_empty(*args[0].shape[:2], args[1].shape[2], dtype=args[2])
        if func is aten._grouped_mm.default:  # torch's own refuses fp32
            return args[0].new_empty(len(args[0]), args[1].shape[-1])
        if func in (aten.addmm.dtype_out, aten.baddbmm.dtype_out):
            return kwargs["out"]
        return func(*args, **kwargs)


def operations_of(name: Any, read: list[Tensor], args: tuple) -> tuple[str, float]:
    """The precision of an op in RATES, and its operations; ("", 0) of what only reads and writes."""
    if name in PRODUCTS:
        a, b = read[-2:]
        return _precision(a), 2.0 * math.prod(a.shape) * b.shape[-1]
    if "scaled_dot_product" in str(name):
        q, k = read[:2] if "backward" not in str(name) else read[1:3]
        causal = 2.0 * math.prod(q.shape) * k.shape[-2]  # half of the pairs
        return _precision(q), causal * (2.5 if "backward" in str(name) else 1.0)
    if name is aten.linalg_cholesky_ex:
        return "factor", math.prod(args[0].shape) * args[0].shape[-1] / 3
    if name is aten.linalg_solve_triangular:
        return "solve", float(args[0].shape[-1]) * math.prod(args[1].shape)
    if name is aten.linalg_qr:
        return "qr", 8 / 3 * math.prod(args[0].shape) * args[0].shape[-1]
    if name is drot_ops.sparsegpt_sweep:
        return "sweep", float(math.prod(args[0].shape)) * args[0].shape[-1]
    if name is drot_ops.spectral_step:
        return "tf32", FAST_PRODUCTS["pruned"] * 2.0 * math.prod(args[0].shape) * args[0].shape[-1]
    if name is drot_ops.swiglu_rotate:
        return _precision(args[0]), 2.0 * math.prod(args[0].shape) * args[2].shape[-1]
    return "", 0.0


def _precision(factor: Tensor) -> str:
    if factor.dtype == torch.float32:
        return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "fp32"
    return "fp64" if factor.dtype == torch.float64 else "bf16"


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes(tensors: list[Tensor]) -> int:
    """The bytes that hold the tensors; a tensor counts once, and an expanded dimension holds none."""
    return sum(
        t.element_size()
        * math.prod(n for n, stride in zip(t.shape, t.stride(), strict=True) if stride or n == 1)
        for t in {id(t): t for t in tensors}.values()
    )


def flash_attention(query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any) -> Tensor:
    """The attention of a GPU, one op without a matrix of scores; `meta` has that of a CPU."""
    return aten._scaled_dot_product_flash_attention(query, key, value, is_causal=True)[0]


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """A context in which drot takes the device `meta` for an H100, and every check of a rotation passes."""
    device, optimizer = torch.device("meta"), importlib.import_module("torch.optim.optimizer")
    set_to: list[tuple[Any, str, Any]] = [
        (module, "is_gpu", lambda device: True) for module in (cholesky, hessian, solve, recover)
    ]
    set_to += [
        (layer_pass, "total_memory", lambda device: GPU_MEMORY),
        (run_module, "free_memory", lambda device: GPU_MEMORY),
        (invariance, "TOLERANCE", math.inf),
        (solve, "ADMM_ITERATIONS", USUAL_ADMM_ITERATIONS),
        (DecoderModel, "loaded_layers", lambda model, device=None: iter(model.layers)),
        (Tensor, "data_ptr", lambda tensor: tensor.untyped_storage()._cdata + tensor.storage_offset()),
        (torch.nn.functional, "scaled_dot_product_attention", flash_attention),
        (optimizer, "_get_fused_kernels_supported_devices", lambda: [device.type]),
        (_config, "meta_nonzero_assume_all_nonzero", True),
    ]
    with contextlib.ExitStack() as changes:
        for owner, name, value in set_to:
            changes.enter_context(mock.patch.object(owner, name, value))
        changes.enter_context(mock.patch.object(torch, "meta", SimpleNamespace(), create=True))
        for table in (stream.TOKENS_PER_BATCH, hessian.PANEL_COLUMNS):
            changes.enter_context(mock.patch.dict(table, {device.type: table["cuda"]}))
        yield


def counted_run(
    model: PreTrainedModel, recipe: ResolvedRecipe, tokens: Tensor, ranks: Ranks = ALONE
) -> Costs:
    """The costs of a run by its steps, but for files. A model on `meta` is pruned as on a GPU."""
    device = model.device
    costs = Costs(device)

    def listen(event: events.Event) -> None:
        if isinstance(event, events.StepBegan | events.StepEnded):
            costs.step = event.step if isinstance(event, events.StepBegan) else ""

    with as_on_a_gpu() if device.type == "meta" else contextlib.nullcontext():
        context = RunContext(model, recipe, tokens, device, lambda event: None, ranks=ranks)
        context.listeners = [listen]
        run = PruningRun(context)
        with costs:
            run.execute(None)
            costs.step = "save"
            run.rotate_ends()
    return costs


def copied_bytes(size: int, hidden: int, ff: int, down_block: int) -> float:
    """The bytes that a run copies between the memories for a layer of `size` bytes, and waits for.

    They are those that a run on `meta` does not make: a finished layer is copied to main memory, with its
    boundary matrix and R3 in bf16, and its R1 and R3 in fp64. R2 is small. The layers come from files, and
    so a thread brings the layer that is checked.
    """
    return size + (2 + 8) * (hidden**2 + ff * down_block)


def hidden_seconds(size: int) -> float:
    """The seconds that threads need for a layer of `size` bytes while the run works.

    One reads the next layer and copies it to the GPU, another writes the layer before and hashes it.
    """
    return size / DISK + max(size / PINNED, size / HASH)


def minutes_of(
    shape: str, quality: str, nsamples: int, seqlen: int, size: int = 1
) -> tuple[dict[str, float], Counter[tuple[str, str]]]:
    """Step → seconds of a layer; and the seconds of its ops. size: the number of ranks.

    The step `copies` is what a run waits for copies and files, as far as no work hides them; `send` is what
    the ranks send; `beside` is of the whole run, and not of a layer.
    """
    dense, config = size > 1, SHAPES[shape]
    asked = Recipe().replace(mode="layer", hessians="dense" if dense else "sequential")
    recipe = resolve(
        asked.with_quality(quality),
        device="cuda",
        positions=seqlen,
        down_width=config["intermediate_size"],
    )
    count, tokens = config["num_hidden_layers"], torch.zeros(nsamples, seqlen, dtype=torch.long)
    values: list[Any] = []

    def counted(layers: int, rank: int = 0) -> tuple[Counter[tuple[str, str]], Counter[str]]:
        """The seconds of a run by step and op, and the bytes that it copies."""
        sizes = AutoConfig.for_model(**config | {"num_hidden_layers": layers}, max_position_embeddings=seqlen)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(sizes, dtype=torch.bfloat16)
        values[:] = values if rank else []
        ranks = CountedRanks(rank, size, values) if dense else ALONE
        costs = counted_run(model.eval().requires_grad_(False), recipe, tokens, ranks)
        found = costs.seconds.copy()
        if isinstance(ranks, CountedRanks):
            found["send", "all"] = ranks.seconds
        return found, costs.copied

    # with --hessians dense a rank trains every n-th layer; rank 1 trains none of a single layer
    two, copied_of_two = counted(2)
    one, copied_of_one = counted(1)
    copied_of_layer = copied_of_two - copied_of_one
    other = counted(1, rank=1)[0] if dense else one
    of_layer, training, first = two.copy(), one.copy(), one.copy()
    of_layer.subtract(one)
    training.subtract(other)
    # a third layer draws no further rotation
    drawn = of_layer.pop(("check", "aten.linalg_qr"), 0.0)
    first.subtract(of_layer)
    first.subtract(training)
    trained = math.ceil(count / size) / count if dense else 0.0  # of the layers, by this rank
    weights, head = config["hidden_size"] * 3 * config["intermediate_size"], config["head_dim"]
    heads = 2 * (config["num_attention_heads"] + config["num_key_value_heads"])
    weights += config["hidden_size"] * head * heads
    ops = Counter({key: of_layer[key] + trained * training[key] for key in of_layer | training})
    seconds = dict.fromkeys(events.STEPS[1:], 0.0)  # the first is `load`
    for (step, _), value in ops.items():
        if step in seconds:
            seconds[step] += value
    read = 2 * weights / DISK + 2 * weights / PINNED
    rotated = config["hidden_size"], config["intermediate_size"], recipe.rotation.down_block or 0
    copied = copied_bytes(2 * weights, *rotated) + sum(copied_of_layer.values())
    work = sum(seconds[step] for step in ("merge", "prune", "recover"))
    seconds["copies"] = copied / HOST
    seconds["send"] = ops["send", "all"]
    ends = 2 * 2 * config["vocab_size"] * config["hidden_size"]
    if count * 2 * weights + ends <= WHOLE_HASH_BYTES:  # it is read for the hash
        seconds["copies"] += 2 * weights / DISK
    if dense:
        # The next layer is read while this layer is calibrated, and, before the last of a batch, trained.
        of_pass = sum(value for (step, _), value in of_layer.items() if step == "calibrate")
        seconds["copies"] += (1 - 1 / size) * max(0.0, read - of_pass)
        # for the check and the pruning of a layer its rotation comes from the files of rank 0
        rotation = 8 * (rotated[0] ** 2 + rotated[1] * rotated[2])
        seconds["copies"] += rotation / DISK
        seconds["send"] += 2 * rotation / HOST + rotation / (NVLINK if size <= 8 else NETWORK)
        work += seconds["check"]  # on the way to the pruning
    else:
        work += seconds["calibrate"] + seconds["rotate"]
        seconds["copies"] += max(0.0, read - seconds["check"])
    seconds["copies"] += max(0.0, hidden_seconds(2 * weights) - work)
    # the ends are read twice and written, copied there and back, and hashed
    seconds["beside"] = START + sum(first.values()) + drawn + ends * (3 / DISK + 2 / HOST + 1 / HASH)
    return seconds, ops


def main() -> None:
    from _harness import add_csv, append_rows, commit  # not above: a test takes `Costs` without this folder

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=sorted(WANTED, reverse=True))
    parser.add_argument("--quality", nargs="+", choices=sorted(QUALITIES), default=list(QUALITIES))
    parser.add_argument("--nsamples", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--ranks", nargs="+", type=int, default=[], help="numbers of GPUs; writes scale.csv")
    parser.add_argument("--ops", type=int, default=0, help="how many ops of a layer are named")
    add_csv(parser)
    options = parser.parse_args()
    rates = ", ".join(f"{name} {rate / 1e12:g}" for name, rate in RATES.items())
    print(f"TFLOP/s: {rates}; memory {MEMORY / 1e12:g} TB/s, main memory {HOST / 1e9:g} GB/s,")
    print(f"disk {DISK / 1e9:g} GB/s, SHA-256 {HASH / 1e9:g} GB/s, an op at least {LAUNCH * 1e6:g} us")
    for shape in options.shape:
        for quality in options.quality:
            alone = None
            for ranks in sorted({1, *options.ranks}):
                seconds, ops = minutes_of(shape, quality, options.nsamples, options.seqlen, ranks)
                row = {"model": shape, "quality": quality, **show(shape, quality, ranks, seconds)}
                if not options.ranks:
                    del row["send"]
                for (step, name), value in ops.most_common(options.ops):
                    print(f"    {step:<10} {name:<36} {value:8.3f} s")
                if options.ranks:
                    alone = alone or float(row["minutes"])
                    row |= compared(shape, quality, ranks, float(row["minutes"]), alone)
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
