"""swiglu_rotate against fp64, and what torch expects of an op."""

import pytest
import torch
from same_bytes import with_threads
from torch import Tensor

from drot.ops import swiglu_rotate, swiglu_rotate_ref

#: largest error relative to the root of the mean square in a row of a block, where the result and, on a GPU,
#: the gated activation are rounded to the dtype
ERRORS = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
SHAPES = [((1,), 1, 2), ((3,), 2, 16), ((2, 5), 3, 64), ((1, 70), 2, 88), ((67,), 2, 33), ((4, 1), 1, 176)]


def drawn(
    shape: tuple[int, ...], blocks: int, size: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    gate, up = (3 * torch.randn(*shape, blocks * size) for _ in range(2))
    rotation = torch.linalg.qr(torch.randn(blocks, size, size, dtype=torch.float64))[0]
    return tuple(t.to(dtype).contiguous().to(device) for t in (gate, up, rotation))


def in_fp64(gate: Tensor, up: Tensor, rotation: Tensor | None = None) -> Tensor:
    """By one dense matrix R, independent of the reference."""
    gate, up = gate.double(), up.double()
    gated = gate / (1 + torch.exp(-gate)) * up
    return gated if rotation is None else gated @ torch.block_diag(*rotation.double())


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize(("shape", "blocks", "size"), SHAPES)
def test_values(shape: tuple[int, ...], blocks: int, size: int, dtype: torch.dtype, device: str) -> None:
    rotated = drawn(shape, blocks, size, dtype, device)
    for arguments in (rotated, rotated[:2]):
        want = in_fp64(*arguments)
        for y in (swiglu_rotate(*arguments), swiglu_rotate_ref(*arguments)):
            assert y.dtype == dtype and y.shape == want.shape and y.is_contiguous()
            in_blocks = want.unflatten(-1, (blocks, size))
            scale = in_blocks.abs() + in_blocks.square().mean(-1, keepdim=True).sqrt()
            error = (y.double() - want).unflatten(-1, (blocks, size)).abs()
            assert bool((error <= ERRORS[dtype] * scale).all())


def test_the_activation_of_every_size_of_gate(device: str) -> None:
    """With R = 1 and up = 1: SiLU from where it is 0 to where it is its argument."""
    gate = torch.cat([torch.linspace(-120, 120, 4001), torch.tensor([-1e38, -1e-30, 0.0, 1e-30, 1e38])])
    gate = torch.cat([gate, gate.new_zeros(-len(gate) % 2)]).to(device)
    eye = torch.eye(2, device=device).expand(len(gate) // 2, 2, 2)
    for rotation in (eye, None):
        y = swiglu_rotate(gate, torch.ones_like(gate), rotation)
        want = torch.nn.functional.silu(gate.double())
        torch.testing.assert_close(y.double(), want, rtol=1e-6, atol=1e-34)


@pytest.mark.parametrize("dtype", ERRORS)
def test_nan_stays_in_its_block(dtype: torch.dtype, device: str) -> None:
    for which in (0, 1):
        arguments = drawn((9,), 3, 64, dtype, device)
        arguments[which][4, 70] = torch.nan
        y = swiglu_rotate(*arguments)
        wanted = torch.zeros(9, 192, dtype=torch.bool, device=device)
        wanted[4, 64:128] = True
        assert torch.equal(y.isnan(), wanted)
        alone = swiglu_rotate(*arguments[:2]).isnan()
        assert bool(alone[4, 70]) and int(alone.sum()) == 1


@pytest.mark.parametrize("size", [64, 33])
def test_views(size: int, device: str) -> None:
    gate, up, rotation = drawn((2, 20), 2, size, torch.bfloat16, device)
    expected = swiglu_rotate(gate, up, rotation)
    halves = torch.cat([gate, up], -1).chunk(2, -1)
    assert torch.equal(swiglu_rotate(*halves, rotation), expected)
    strided = [torch.stack([t, t], -1)[..., 0] for t in (gate, up)]
    assert torch.equal(swiglu_rotate(*strided, rotation.mT.contiguous().mT), expected)
    store = torch.zeros(gate.numel() + 1, dtype=gate.dtype, device=device)
    unaligned = store[1:].view(gate.shape).copy_(gate)
    assert torch.equal(swiglu_rotate(unaligned, up, rotation), expected)
    swapped = [t.transpose(0, 1) for t in (gate, up)]
    assert torch.equal(swiglu_rotate(*swapped, rotation), expected.transpose(0, 1))
    alone = swiglu_rotate(gate, up)
    for pair in (halves, strided, (unaligned, up)):
        assert torch.equal(swiglu_rotate(*pair), alone)
    assert torch.equal(swiglu_rotate(*swapped), alone.transpose(0, 1))


def test_the_bytes_depend_on_no_other_token_and_on_no_thread() -> None:
    gate, up, rotation = drawn((131,), 3, 64, torch.float32, "cpu")
    for count in (1, 2, 3):
        with with_threads(count):
            whole = swiglu_rotate(gate, up, rotation)
            alone = torch.cat([swiglu_rotate(gate[i : i + 1], up[i : i + 1], rotation) for i in range(131)])
            assert torch.equal(whole, alone)
            rows = swiglu_rotate(gate, up)
            assert torch.equal(rows.flatten(), swiglu_rotate(gate.flatten(), up.flatten()))


def test_nothing(device: str) -> None:
    for shape in ((0, 8), (3, 0, 8)):
        empty = torch.zeros(shape, device=device)
        assert swiglu_rotate(empty, empty, torch.zeros(2, 4, 4, device=device)).shape == shape
    nothing = torch.zeros(3, 0, device=device)
    assert swiglu_rotate(nothing, nothing, torch.zeros(0, 4, 4, device=device)).shape == (3, 0)
    assert swiglu_rotate(nothing, nothing).shape == (3, 0)
    gate, blocks = nothing.clone().requires_grad_(), torch.zeros(0, 4, 4, device=device).requires_grad_()
    swiglu_rotate(gate, nothing, blocks).sum().backward()
    assert gate.grad.shape == (3, 0) and blocks.grad.shape == (0, 4, 4)


def test_forward_mode_is_refused(device: str) -> None:
    gate, up = torch.ones(2, 1, 4, device=device)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative; use swiglu_rotate_ref"):
        torch.func.jvp(lambda gate: swiglu_rotate(gate, up), (gate,), (gate,))


@pytest.mark.parametrize(
    ("gate", "up", "rotation", "dtypes", "message"),
    [
        ((2, 8), (2, 8), (4, 4), "fff", r"rotation must be \[n, b, b\], got \[4, 4\]"),
        ((2, 8), (2, 8), (2, 4, 3), "fff", r"rotation must be \[n, b, b\], got \[2, 4, 3\]"),
        ((2, 9), (2, 9), (2, 4, 4), "fff", r"gate must be \[..., 8\].* got \[2, 9\]"),
        ((2, 8), (8,), (2, 4, 4), "fff", "up must have the shape of gate"),
        ((2, 8), (2, 8), (2, 4, 4), "fhf", "up must have the dtype of gate"),
        ((2, 8), (2, 8), (2, 4, 4), "hff", "rotation must have the dtype of gate"),
        ((2, 8), (2, 8), (2, 4, 4), "ddd", "gate must be one of BFloat16, Half, Float, got Double"),
        ((2, 8), (2, 9), None, "ff", "up must have the shape of gate"),
        ((2, 8), (2, 8), None, "fh", "up must have the dtype of gate"),
        ((), (), None, "ff", r"gate must be \[..., n\], got \[\]"),
    ],
)
def test_wrong_arguments(gate, up, rotation, dtypes: str, message: str) -> None:
    names = {"f": torch.float32, "h": torch.float16, "d": torch.float64}
    shapes = zip((gate, up, rotation), dtypes, strict=False)
    with pytest.raises(ValueError, match=message):
        swiglu_rotate(*(torch.zeros(shape, dtype=names[dtype]) for shape, dtype in shapes))


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("size", [64, 33])
@pytest.mark.parametrize(
    "numbers", [(1,), (0, 1, 0, 2), (70, 0, 16, 1), (1,) * 140], ids=lambda n: f"{n[:4]}"
)
def test_experts(numbers: tuple[int, ...], size: int, dtype: torch.dtype, device: str) -> None:
    """Each expert's rows are rotated by its own blocks, as by a call for that expert alone."""
    experts, rows = len(numbers), sum(numbers)
    gate, up = (3 * torch.randn(rows, 2 * size).to(device, dtype) for _ in range(2))
    rotation = torch.linalg.qr(torch.randn(2 * experts, size, size))[0].to(device, dtype)
    ends = torch.tensor(numbers, device=device).cumsum(0).int()
    parts = [*zip(gate.split(numbers), up.split(numbers), rotation.unflatten(0, (experts, 2)), strict=True)]
    want = torch.cat([in_fp64(*part) for part in parts])
    for y in (swiglu_rotate(gate, up, rotation, ends), swiglu_rotate_ref(gate, up, rotation, ends)):
        assert y.dtype == dtype and y.shape == want.shape
        scale = want.unflatten(-1, (2, size))
        scale = scale.abs() + scale.square().mean(-1, keepdim=True).sqrt()
        error = (y.double() - want).unflatten(-1, (2, size)).abs()
        assert bool((error <= ERRORS[dtype] * scale).all())
    if device == "cpu":
        alone = torch.cat([swiglu_rotate(*part) for part in parts])
        assert torch.equal(swiglu_rotate(gate, up, rotation, ends), alone)


def test_experts_of_nothing_and_of_views(device: str) -> None:
    rotation = torch.randn(6, 4, 4, device=device)
    none = torch.zeros(3, dtype=torch.int32, device=device)
    empty = torch.zeros(0, 8, device=device)
    assert swiglu_rotate(empty, empty, rotation, none).shape == (0, 8)
    both, ends = torch.randn(5, 16, device=device), torch.tensor([1, 1, 5], device=device).int()
    strided = torch.stack([ends, ends], -1)[:, 0]
    want = swiglu_rotate(*(t.contiguous() for t in both.chunk(2, -1)), rotation, ends)
    assert torch.equal(swiglu_rotate(*both.chunk(2, -1), rotation, strided), want)


def test_wrong_ends() -> None:
    gate, rotation = torch.zeros(3, 8), torch.zeros(4, 4, 4)
    wrong = {
        "ends must come with a rotation": (gate, gate, None, torch.tensor([1, 3]).int()),
        "the same number of blocks for each of 3 experts, got 4": (
            *(gate, gate, rotation),
            torch.tensor([1, 2, 3]).int(),
        ),
        "gate must be .*8.*, got": (gate[:, :4], gate[:, :4], rotation, torch.tensor([1, 3]).int()),
        r"gate must be \[rows, n\]": (gate[None], gate[None], rotation, torch.tensor([1, 3]).int()),
        "ends must be one of Int": (gate, gate, rotation, torch.tensor([1, 3])),
        r"ends must be \[2\]": (gate, gate, rotation, torch.tensor([[1, 3]]).int()),
        "ends must not descend": (gate, gate, rotation, torch.tensor([4, 3]).int()),
        "ends must end with the 3 rows of gate, got 4": (gate, gate, rotation, torch.tensor([1, 4]).int()),
    }
    for message, given in wrong.items():
        with pytest.raises(ValueError, match=message):
            swiglu_rotate(*given)
    with pytest.raises(NotImplementedError, match="no gradient with ends"):
        swiglu_rotate(gate.requires_grad_(), gate, rotation, torch.tensor([1, 3]).int())


@pytest.mark.parametrize(
    ("needed", "rotated"),
    [*(((i,), True) for i in range(3)), ((0, 1, 2), True), ((0,), False), ((0, 1), False)],
)
def test_gradients(needed: tuple[int, ...], rotated: bool, device: str) -> None:
    """The first and the second, by autograd of the dense product in fp64."""

    def gradients(function, arguments: list[Tensor]) -> list[Tensor]:
        chosen = [arguments[i].requires_grad_() for i in needed]
        y = function(*arguments)
        first = torch.autograd.grad(y.cos().sum(), chosen, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), chosen)
        return [*first, *second]

    drawn_ones = drawn((2, 5), 3, 16, torch.float32, device)[: 3 if rotated else 2]
    found = gradients(swiglu_rotate, [t.clone() for t in drawn_ones])
    want = gradients(in_fp64, [t.double() for t in drawn_ones])
    for ours, exact in zip(found, want, strict=True):
        assert ours.dtype == torch.float32
        assert float((ours.double() - exact).detach().norm() / exact.detach().norm()) < 1e-5


def test_gradients_have_the_dtypes_of_their_arguments(device: str) -> None:
    arguments = [t.requires_grad_() for t in drawn((3,), 2, 8, torch.bfloat16, device)]
    swiglu_rotate(*arguments).sum().backward()
    assert [t.grad.dtype for t in arguments] == [torch.bfloat16] * 3


def test_gradients_under_autocast(device: str) -> None:
    """The gradients are computed in fp32, as without autocast."""
    arguments = [t.requires_grad_() for t in drawn((5,), 2, 64, torch.float32, device)]
    want = torch.autograd.grad(swiglu_rotate(*arguments).square().sum(), arguments)
    with torch.autocast(device, torch.bfloat16):
        got = torch.autograd.grad(swiglu_rotate(*arguments).square().sum(), arguments)
    assert all(map(torch.equal, got, want))


def test_the_result_is_the_same_with_a_gradient_and_without(device: str) -> None:
    gate, up, rotation = drawn((7,), 2, 64, torch.float32, device)
    alone = swiglu_rotate(gate, up, rotation)
    assert not alone.requires_grad
    assert torch.equal(swiglu_rotate(gate.requires_grad_(), up, rotation), alone)


@pytest.mark.slow
def test_torch_accepts_the_op_and_compiles_it(device: str) -> None:
    arguments = drawn((2, 3), 2, 32, torch.float32, device)
    for given in (arguments, arguments[:2]):
        torch.library.opcheck(torch.ops.drot.swiglu_rotate.default, given)
    of_experts = (*drawn((3,), 2, 8, torch.float32, device)[:2], torch.randn(4, 8, 8, device=device))
    ends = torch.tensor([1, 3], dtype=torch.int32, device=device)
    torch.library.opcheck(torch.ops.drot.swiglu_rotate.default, (*of_experts, ends))
    compiled = torch.compile(lambda *a: 2 * swiglu_rotate(*a), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments), 2 * swiglu_rotate(*arguments))
