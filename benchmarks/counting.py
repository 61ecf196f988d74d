"""A run of `drot prune` on tensors without storage, and what it would cost on H100s. No GPU is needed.

The run is the code of `drot prune` on the device `meta`, as on a GPU: a mode sees every op with its shapes,
and what a rank would send, write and read is counted in its place. minutes.py adds the costs up.
"""

import contextlib
import functools
import importlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx.experimental import _config
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from drot.calibration import cholesky, hessian, layer_pass, stream
from drot.checkpoint.resume import RunState
from drot.config import ResolvedRecipe
from drot.machine import transfer
from drot.machine.ranks import ALONE, CPU, Ranks
from drot.model.decoder import DecoderModel
from drot.pipeline import distill, invariance, kept_weights, states, training, weigh
from drot.pipeline import run as run_module
from drot.pipeline.context import RunContext
from drot.pipeline.run import PruningRun
from drot.pipeline.steps import RUN_SUFFIX
from drot.pipeline.work import FAST_PRODUCTS, USUAL_ADMM_ITERATIONS
from drot.pruning import solve

#: What one H100 (SXM) reaches. Operations a second of large products by their precision: 798 TFLOP/s in bf16,
#: and about the others, are what others have measured. The rates of what is no product are estimates: the
#: factor of a block, a triangular solve, QR, and the sweep of SparseGPT within a block.
RATES = {"bf16": 798e12, "tf32": 350e12, "fp32": 50e12, "fp64": 50e12}
RATES |= {"factor": 2e12, "solve": 25e12, "qr": 1e12, "sweep": 5e12}
#: bytes a second of its memory, as others have measured; estimates between it and pageable main memory, and
#: of the disk; SHA-256 of a file in memory on one core, as `file_record` did it on an AMD EPYC with SHA
#: extensions, which machines with these GPUs have too
MEMORY, HOST, DISK, HASH = 3.0e12, 6e9, 2e9, 1.8e9
#: bytes a second between the memory of a GPU and pinned main memory, an estimate
PINNED = 25e9
#: bytes a second that pass the main memory of a machine in all, two thirds of 16 channels of DDR5-4800
HOST_TRAFFIC = 400e9
#: seconds of an op with its launch in Python, and of a value that the host reads
LAUNCH, WAIT = 10e-6, 30e-6
#: seconds until a collective call begins to send: between machines, and within; and of a number or an object,
#: which the CPUs send. Estimates.
LATENCY, MESSAGE = (60e-6, 30e-6), 0.5e-3
#: its bytes of memory, by which a run decides what stays there
GPU_MEMORY = 80e9
#: main memory for each GPU, as in a DGX H100, for the inputs of layers that a backward pass needs
HOST_MEMORY = 256e9
#: bytes a second that a rank sends to another of its machine over NVLink, and that pass an adapter of the
#: network: 400 Gbit/s, of which the authors of NCCL expect 46 to 48 GB/s. A DGX H100 has an adapter for
#: each GPU.
NVLINK, ADAPTER, GPUS_OF_A_MACHINE = 400e9, 50e9, 8
aten, drot_ops = torch.ops.aten, torch.ops.drot
PRODUCTS = (aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.addmm_, aten.baddbmm_)
#: steps in which neither the embedding nor the head is on the device, while `meta` holds them all the time
OF_LAYERS = ("rotate", "merge", "prune", "recover")
#: ops that launch nothing
FREE = (aten._unsafe_view, aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.detach)
#: ops that read as much of their first argument as they write
GATHERS = (aten.index, aten.embedding)
#: ops that do not read their first argument
WRITES = (aten.copy_, aten.zero_, aten.fill_, aten.zeros_like, aten.ones_like)


class CountedRanks(Ranks):
    """A rank of several that do the same at the same time. It counts the seconds in which it would send.

    values: what `on_rank` gave to rank 0 in the same run, for another rank; rank 0 writes it there.
    adapters: of the network, in each machine. NCCL makes as many rings, each of which sends another part.

    Attributes:
        seconds: in which the rank would send.
    """

    first = True  # every rank has the files

    def __init__(self, rank: int, size: int, values: list[Any], adapters: int = GPUS_OF_A_MACHINE) -> None:
        local_size = min(size, GPUS_OF_A_MACHINE)
        super().__init__(rank, size, rank % GPUS_OF_A_MACHINE, local_size=local_size)
        self.seconds, self._values = 0.0, values
        self._coming = iter(list(values)) if rank else None
        self._rate = NVLINK if size == local_size else min(NVLINK, adapters * ADAPTER)

    def _send(self, size: float) -> None:
        self.seconds += LATENCY[self.size == self.local_size] + size / self._rate

    def _reduce(self, tensor: Tensor) -> None:
        self._send(2 * self._of_others * tensor.nbytes)

    def _gather_(self, whole: Tensor) -> None:
        self._send(self._of_others * whole.nbytes)

    def total(self, value: float) -> float:
        self.seconds += MESSAGE
        return value * self.size

    def each(self, value: Any) -> list[Any]:
        self.seconds += MESSAGE
        return [value] * self.size

    def on_rank(self, rank: int, function: Any, device: torch.device = CPU) -> Any:
        if self._coming is not None:
            result = next(self._coming)
        else:
            result = function() if rank == self.rank else self._values[-1]  # of another layer, as large
            self._values.append(result)
        self.seconds += MESSAGE
        for tensor in _tensors(result):  # to the GPU of the sender, and home from those of the others
            self._send(self._of_others * tensor.nbytes)
            self.seconds += ((not tensor.is_meta) + (device == CPU)) * tensor.nbytes / PINNED
        return tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device=device), result)

    def same(self, tensors: Any) -> bool:
        return True

    @property
    def _of_others(self) -> float:
        return (self.size - 1) / self.size


class Costs(TorchDispatchMode):
    """Counts the seconds of the ops at RATES, by `step` and by name.

    The values that the host reads of a tensor on `meta` fall slowly, as a loss does; those of integers are 0.

    device: where the run computes. step: where the next ops count.
    operations: (step, precision) → operations. copied: bytes that went to `device` or came from it.
    overlapping: those of them that are pinned, and on their way while the run computes.
    layers_ahead: how many layers lie on the device while the ranks train known rotations.
    before: `seconds` when the check of the rotations began, before which known rotations are trained.
    peak: step → the most bytes that the tensors on `device` took at once.
    ends: the bytes of the embedding and the head, which a run does not hold in the steps of a layer.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.step, self.layers_ahead = device, "", 1
        self.seconds: Counter[tuple[str, str]] = Counter()
        self.before: Counter[tuple[str, str]] = Counter()
        self.operations: Counter[tuple[str, str]] = Counter()
        self.launches: Counter[str] = Counter()
        self.copied: Counter[str] = Counter()
        self.overlapping: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.ends = 0
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
        names, unread = _arguments(func)
        given = dict(zip(names, args, strict=False)) | kwargs
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
        if self.device.type != "meta":
            types_of.discard("meta")  # a layer that is dropped
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
        ends = self.ends if self.step in OF_LAYERS else 0
        if self._taken - ends > self.peak[self.step]:
            self._living = {key: each for key, each in self._living.items() if not each[0].expired()}
            self._taken = sum(size for _, size in self._living.values())
            self.peak[self.step] = max(self.peak[self.step], self._taken - ends)

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

    @contextlib.contextmanager
    def overlapped(self) -> Iterator[None]:
        """A context whose copies overlap with the run's work, as those of `ahead` and `CopiesHome` do."""
        before = self.copied[self.step]
        yield
        self.overlapping[self.step] += self.copied[self.step] - before

    def ahead(self, sources: Iterable[Tensor], device: torch.device) -> Iterator[Tensor]:
        """Takes the place of drot.machine.transfer.ahead."""
        for source in sources:
            with self.overlapped():
                tensor = source.to(device)
            yield tensor

    def write(self, home: transfer.CopiesHome, target: Tensor, result: Tensor) -> None:
        """Takes the place of CopiesHome.write."""
        with self.overlapped():
            target.copy_(result)


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


@functools.cache
def _arguments(func: Any) -> tuple[list[str], set[str]]:
    """The names of an op's arguments, and of those that it does not read."""
    arguments = func._schema.arguments
    unread = {a.name for a in arguments if a.is_out}
    if func.overloadpacket in WRITES:
        unread.add(arguments[0].name)
    return [a.name for a in arguments], unread


def _tensors(tree: Any) -> list[Tensor]:
    """The tensors among the arguments or the results of an op, twice as fast as by torch's pytree."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return []
    return [tensor for leaf in tree for tensor in _tensors(leaf)]


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


class CountedFiles(RunState):
    """Counts the bytes of the parts. Nothing is on the disk.

    written: `rotation` and `layer` → the bytes of their parts, which a thread writes. home: the bytes that it
        copies from the GPU before.
    ahead: the bytes that are read before they are needed.
    """

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(Path("nowhere", "out"), {}, ranks=ranks)
        self.written, self.home, self.ahead = Counter[str](), 0, 0
        self._kept: dict[str, dict[str, Tensor]] = {}
        self._layers: dict[str, dict[str, Any]] = {}
        self._asked = ""

    def save_later(self, parts: Mapping[str, tuple[Mapping[str, Tensor], Any]]) -> None:
        for name, (tensors, _) in parts.items():
            kind = name.partition("_")[0]
            self.written[kind] += sum(tensor.nbytes for tensor in tensors.values())
            self.home += sum(tensor.nbytes for tensor in tensors.values() if tensor.is_meta)
            if kind == "layer" and not name.endswith(RUN_SUFFIX):
                self._layers[name] = {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()}
            elif kind in ("rotation", "layer"):
                self._kept[name] = {key: torch.empty_like(t, device="cpu") for key, t in tensors.items()}

    def save(self, name: str, tensors: Mapping[str, Tensor], record: Any) -> None:
        self.save_later({name: (tensors, record)})

    def read_ahead(self, name: str, device: torch.device) -> None:
        self._asked = name

    def loaded_alone(self, name: str) -> dict[str, Tensor]:
        if name in self._layers:
            shapes = self._layers[name].items()
            return {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in shapes}
        if name == self._asked:
            self.ahead += sum(tensor.nbytes for tensor in self._kept[name].values())
        return self._kept[name]

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        yield


def _places_of_half(parameter: Tensor) -> Tensor:
    """The places of the kept weights of a parameter, which are half of them; on `meta` none is known."""
    kept = parameter.detach() != 0
    return torch.arange(kept.numel() // 2, device=parameter.device)


def _take_half(parameter: Tensor, values: Tensor) -> Tensor:
    return values.flatten()[_places_of_half(parameter)]


def _put_half(parameter: Tensor, values: Tensor) -> None:
    parameter.view(-1)[_places_of_half(parameter)] = values


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """A context in which drot takes the device `meta` for an H100, and every check of a rotation passes."""
    device, optimizer = torch.device("meta"), importlib.import_module("torch.optim.optimizer")
    set_to: list[tuple[Any, str, Any]] = [
        (module, "is_gpu", lambda device: True)
        for module in (cholesky, distill, hessian, kept_weights, solve, training, states, weigh)
    ]
    set_to += [
        (layer_pass, "total_memory", lambda device: GPU_MEMORY),
        (layer_pass, "free_memory", lambda device: GPU_MEMORY),
        (run_module, "free_memory", lambda device: GPU_MEMORY),
        (training, "free_memory", lambda device: GPU_MEMORY),
        (distill, "free_memory", lambda device: GPU_MEMORY),
        (kept_weights, "take_kept", _take_half),
        (kept_weights, "put_kept", _put_half),
        (states, "free_memory", lambda device: GPU_MEMORY),
        (weigh, "free_memory", lambda device: GPU_MEMORY),
        (weigh, "available_memory", lambda: HOST_MEMORY),
        (states, "available_memory", lambda: math.inf),
        (invariance, "TOLERANCE", math.inf),
        (solve, "ADMM_ITERATIONS", USUAL_ADMM_ITERATIONS),
        (DecoderModel, "loaded_layers", lambda model: iter(model.layers)),
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
) -> tuple[Costs, CountedFiles]:
    """The costs of a run by its steps, and its files beside the model's. `meta` is taken for a GPU."""
    device = model.device
    costs = Costs(device)
    files = CountedFiles(ranks)

    @contextlib.contextmanager
    def during(step: str) -> Iterator[None]:
        costs.step = step
        if step == "check" and not costs.before:
            costs.before = costs.seconds.copy()
        yield
        costs.step = ""

    with as_on_a_gpu() if device.type == "meta" else contextlib.nullcontext():
        # a skeleton, as a run that reads its layers from files
        weights: Any = SimpleNamespace(read_module=lambda module, name: None)
        weights = weights if device.type == "meta" else None
        further = tokens[:1].repeat(recipe.recovery.distill_nsamples, 1)
        context = RunContext(
            model, recipe, tokens, device, lambda event: None, weights=weights, ranks=ranks,
            distill_tokens=further if len(further) else None,
        )  # fmt: skip
        costs.layers_ahead = training.layers_ahead(context)
        layers = f"{context.model.family.layers}."
        outside = [part.nbytes for name, part in model.named_parameters() if not name.startswith(layers)]
        costs.ends = sum(outside)
        run = PruningRun(context)
        with (
            mock.patch.object(context.watch, "during", during),
            mock.patch.object(stream, "ahead", costs.ahead),
            mock.patch.object(transfer.CopiesHome, "write", lambda *given: costs.write(*given)),
            costs,
        ):
            run.execute(files)
            costs.step = "save"
            run.rotate_ends()
    return costs, files
