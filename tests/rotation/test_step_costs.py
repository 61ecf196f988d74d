"""What a training step costs on a GPU, counted on tensors without storage for a layer of LLaMA-3-8B."""

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drot.config import Recipe, Sparsity, resolve
from drot.machine.graph import WARM_UP, GraphedStep, Step
from drot.model.families import LLAMA
from drot.model.sizes import HeadShape
from drot.ops import skew_momentum
from drot.rotation import importance, train
from drot.rotation.importance import Metric
from drot.rotation.objective import LayerObjective

D, FF, KV = 4096, 14336, 1024
SHAPE = HeadShape(heads=32, kv_heads=8, head_dim=128)
SIZES = {
    "q_proj": (D, D), "k_proj": (KV, D), "v_proj": (KV, D), "o_proj": (D, D),
    "gate_proj": (FF, D), "up_proj": (FF, D), "down_proj": (D, FF),
}  # fmt: skip
#: Of the launches 33 are matrix products. Of the bytes 0.87 GB are the losses, which read y and write dy, and
#: 0.4 GB the step: the gradient in fp32, the momentum, the polar factor.
MOST_LAUNCHES, MOST_BYTES = 60, 1.6e9
aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.addmm_, aten.baddbmm_)


#: ops that do not read their first argument
WRITES = (aten.copy_, aten.zero_, aten.fill_, aten.zeros_like)


class Costs(TorchDispatchMode):
    """Counts floating-point operations of products, launches, and the bytes that all else reads and writes.

    A product that adds to another tensor than its result copies that tensor first, on a GPU: that is a launch
    and bytes too. An op of drot counts as one launch, as an op of torch does; it starts up to three kernels.
    torch has no shape function of products with `out_dtype`, so their results are made here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.launches = self.bytes = 0
        self.by_name: dict[str, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.bmm.dtype:
            result = args[0].new_empty(*args[0].shape[:2], args[1].shape[2], dtype=args[2])
        elif func is aten.baddbmm.dtype_out:
            result = kwargs["out"]
        else:
            result = func(*args, **kwargs)
        name = func.overloadpacket
        values = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
        targets = {
            a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write
        }
        only_written = {a.name for a in func._schema.arguments if a.is_out}
        if name in WRITES:
            only_written.add(func._schema.arguments[0].name)
        tensors = _tensors([value for key, value in values.items() if key not in only_written])
        written = _tensors([result, *(values[key] for key in targets if key in values)])
        if func.is_view or name in (
            aten._unsafe_view,
            aten.empty,
            aten.empty_like,
            aten.new_empty,
            aten.empty_strided,
        ):
            return result
        if name in PRODUCTS:
            a, b = tensors[-2:]
            self.flops += 2 * math.prod(a.shape) * b.shape[-1]
            self._add(func, 0)
            if (
                name in (aten.addmm, aten.baddbmm)
                and kwargs.get("beta") != 0
                and written[0] is not tensors[0]
            ):
                self._add("copy", 2 * _bytes(written[:1]))
        else:
            size = _bytes(tensors) + _bytes(written)
            if func is torch.ops.drot.skew_momentum.default and not values.get("square_decay"):
                # half of the momentum is read and written
                size -= _bytes([values["momentum"]])
            self._add(func, size)
        return result

    def _add(self, name: Any, size: int) -> None:
        self.launches += 1
        self.bytes += size
        entry = self.by_name.setdefault(str(name), [0, 0])
        entry[0] += 1
        entry[1] += size


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes(tensors: list[Tensor]) -> int:
    """The bytes that hold the tensors; a tensor counts once, and an expanded dimension holds none."""
    return sum(
        t.element_size()
        * math.prod(n for n, stride in zip(t.shape, t.stride(), strict=True) if stride or n == 1)
        for t in {id(t): t for t in tensors}.values()
    )


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], LayerObjective]:
    monkeypatch.setattr(importance, "upper_factor", lambda matrix: matrix)  # it reads values

    def make(kind: str) -> LayerObjective:
        sizes = {"attention": (D, D), "mlp": (D, D), "o": (32, 128, 128), "down": (FF,)}
        metrics = {group: Metric(torch.empty(*size, device="meta"), True) for group, size in sizes.items()}
        weights = {name: torch.empty(*size, device="meta") for name, size in SIZES.items()}
        return LayerObjective(
            weights, metrics, LLAMA.groups, SHAPE, objective=kind,
            sparsity=Sparsity.parse("2:4"), product_dtype=torch.bfloat16,
        )  # fmt: skip

    return make


def costs_of_a_step(objective: LayerObjective, monkeypatch: pytest.MonkeyPatch) -> Costs:
    """The costs of a replay of the step that `train_rotation` captures.

    Not counted: the angle of the next step, and in every tenth step a copy of the matrices.
    """

    class Stop(Exception):
        pass

    steps: list[Step] = []

    def keep(step: Step, capture: Any, state: Any) -> None:
        steps.append(step)
        raise Stop

    monkeypatch.setattr(train, "GraphedStep", keep)
    recipe = Recipe().replace(steps=10, objective=objective.objective)
    with pytest.raises(Stop):
        train.train_rotation([objective], resolve(recipe).rotation)

    graphed = GraphedStep(steps[0], lambda step: (step, step()), [])
    for _ in range(WARM_UP + 2):
        with Costs() as costs:
            graphed()
    return costs


def reference_flops(monkeypatch: pytest.MonkeyPatch) -> int:
    """The operations of the paper's formulation for the same layer, counted by torch, without its QR."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    bench: Any = importlib.import_module("bench_rotation_step")
    problem = bench.Problem(D, "meta", ff=FF)
    r1 = torch.empty(D, D, device="meta").requires_grad_()
    r2 = torch.empty(SHAPE.kv_heads, SHAPE.head_dim, SHAPE.head_dim, device="meta").requires_grad_()
    return bench.flops(lambda: problem.reference_loss(r1, r2).backward())


@pytest.mark.parametrize("kind", ["entropy", "pruned"])
def test_costs_of_a_step(
    kind: str, layer: Callable[[str], LayerObjective], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors without storage hold no value, so that the step cannot have read one on the host."""
    costs = costs_of_a_step(layer(kind), monkeypatch)
    assert costs.flops <= 0.48 * reference_flops(monkeypatch) + 2.5e12
    assert costs.launches <= MOST_LAUNCHES
    assert costs.bytes <= MOST_BYTES
    op = {"entropy": "drot.entropy_loss.default", "pruned": "drot.pruned_importance.default"}[kind]
    loss = costs.by_name[op][1]
    weights = sum(rows * columns for rows, columns in SIZES.values())
    assert loss >= 4 * weights  # y is read and dy written, in two bytes each


def test_the_counter_counts() -> None:
    a, b = (torch.empty(*size, device="meta", dtype=torch.bfloat16) for size in ((2, 4, 8), (2, 8, 16)))
    total = torch.empty(2, 4, 16, device="meta")
    with Costs() as costs:
        torch.bmm(a, b, out_dtype=torch.float32)
        torch.baddbmm(total, a, b, out_dtype=torch.float32, out=total)
    assert (costs.flops, costs.launches, costs.bytes) == (2 * 2 * 2 * 4 * 8 * 16, 2, 0)
    with Costs() as costs:
        torch.baddbmm(total.bfloat16(), a, b)
    assert (costs.flops, costs.launches) == (2 * 2 * 4 * 8 * 16, 3)  # the cast, the copy, the product
    assert costs.bytes == 128 * (4 + 2) + 2 * 128 * 2
    with Costs() as costs:
        torch.baddbmm(total[:, :, :4], total, total.mT, beta=0, out=torch.empty(2, 4, 4, device="meta"))
        torch.empty(2, 4, 4, device="meta").baddbmm_(total, total.mT)
    assert (costs.launches, costs.bytes) == (2, 0)  # nothing is copied
    with Costs() as costs:
        torch.mul(total, 2, out=torch.empty(2, 4, 16, device="meta", dtype=torch.bfloat16))
    assert (costs.launches, costs.bytes) == (1, 128 * (4 + 2))  # `out` is written and not read
    with Costs() as costs:
        total.add_(total.clone())
        total.copy_(total.clone())
    assert (costs.launches, costs.bytes) == (4, 128 * 4 * (2 + 3 + 2 + 2))  # a copy does not read its target
    with Costs() as costs:
        square = torch.zeros(2, 4, 4, device="meta", dtype=torch.bfloat16)
        skew_momentum(square, square.clone(), 0.9)
    # zeros, their copy, the op: the product is read, u written, half of the momentum read and written
    assert (costs.launches, costs.bytes) == (3, 32 * 2 * (1 + 2 + 1 + 1 + 1))
    with Costs() as costs:
        total[0].unsqueeze(0).expand(5, -1, -1) + 1
    assert (costs.launches, costs.bytes) == (1, 4 * (64 + 5 * 64))
