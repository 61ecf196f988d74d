"""rope against fp64, against transformers, and what torch expects of an op."""

import pytest
import torch
from same_bytes import with_threads
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from drot.ops import rope, rope_ref

#: half a unit in the last place
ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}
#: b, h, g, t, d
SHAPES = [(1, 4, 2, 1, 128), (2, 3, 1, 5, 64), (3, 8, 8, 2, 80), (1, 2, 1, 33, 6), (2, 1, 1, 1, 2)]


def drawn(shape: tuple[int, ...], dtype: torch.dtype, device: str, rows: int | None = None) -> list[Tensor]:
    """Queries, keys, and factors that differ in the halves of a head."""
    b, h, g, t, d = shape
    sizes = ((b, h, t, d), (b, g, t, d), (rows or b, t, d), (rows or b, t, d))
    return [torch.randn(size).to(dtype).to(device) for size in sizes]


def in_fp64(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """By a matrix for each pair, independent of the reference."""
    found = []
    for heads in (q, k):
        half = heads.shape[-1] // 2
        pairs = torch.stack([heads[..., :half], heads[..., half:]], -1).double()
        c, s = cos.double()[:, None], sin.double()[:, None]
        first = torch.stack([c[..., :half], -s[..., :half]], -1)
        second = torch.stack([s[..., half:], c[..., half:]], -1)
        turned = torch.einsum("...ij,...j->...i", torch.stack([first, second], -2), pairs)
        found.append(torch.cat([turned[..., 0], turned[..., 1]], -1))
    return found


def sums_of_terms(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """|x cos| + |y sin| and |y cos| + |x sin|, of which each is rounded, and their sum."""
    found = []
    for heads in (q, k):
        size, other = heads.double().abs(), heads.double().abs().roll(heads.shape[-1] // 2, -1)
        found.append(size * cos.double()[:, None].abs() + other * sin.double()[:, None].abs())
    return found


@pytest.mark.parametrize("rows", [None, 1])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("shape", SHAPES)
def test_values(shape: tuple[int, ...], dtype: torch.dtype, rows: int | None, device: str) -> None:
    arguments = drawn(shape, dtype, device, rows)
    wanted = in_fp64(*arguments)
    for found in (rope(*arguments), rope_ref(*arguments)):
        for one, want, heads, term in zip(found, wanted, arguments, sums_of_terms(*arguments), strict=False):
            assert one.dtype == dtype and one.shape == heads.shape
            assert bool(((one.double() - want).abs() <= 1.01 * ROUNDING[dtype] * 2 * term).all())


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bits_of_transformers(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    arguments = drawn(shape, dtype, device)
    for found in (rope(*arguments), rope_ref(*arguments)):
        assert all(map(torch.equal, found, apply_rotary_pos_emb(*arguments)))


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("d", [64, 6])
def test_views(d: int, dtype: torch.dtype, device: str) -> None:
    """Parts of a fused product, unaligned ones, heads whose numbers lie apart: the same bytes."""
    arguments = drawn((2, 4, 2, 5, d), dtype, device)
    wanted = rope(*arguments)
    q, k = (heads.transpose(1, 2).flatten(2) for heads in arguments[:2])
    for before in (0, 1, 8):
        product = torch.cat([q.new_zeros(2, 5, before), q, k], -1)
        parts = product[..., before : before + 4 * d], product[..., before + 4 * d :]
        views = [part.unflatten(-1, (-1, d)).transpose(1, 2) for part in parts]
        assert all(map(torch.equal, rope(*views, *arguments[2:]), wanted))
    apart = [torch.stack([t, t], -1)[..., 0] for t in arguments]
    assert all(map(torch.equal, rope(*apart), wanted))
    one_row = [t[:1] for t in arguments[2:]]
    expanded = [t.expand(2, -1, -1) for t in one_row]
    assert all(map(torch.equal, rope(*arguments[:2], *expanded), rope(*arguments[:2], *one_row)))
    assert all(t.transpose(1, 2).is_contiguous() for t in wanted)


def test_nothing(device: str) -> None:
    for shape in ((0, 2, 1, 3, 8), (2, 2, 1, 0, 8), (2, 2, 1, 3, 0), (2, 0, 0, 3, 8)):
        arguments = drawn(shape, torch.float32, device)
        assert [t.shape for t in rope(*arguments)] == [t.shape for t in arguments[:2]]


@pytest.mark.parametrize(
    ("which", "shape", "dtype", "message"),
    [
        (0, (2, 3, 8), "float32", r"q must be \[b, h, t, d\] with an even d, got \[2, 3, 8\]"),
        (0, (2, 4, 3, 7), "float32", "with an even d"),
        (0, (2, 4, 3, 8), "float64", "q must be one of BFloat16, Half, Float, got Double"),
        (1, (2, 2, 4, 8), "float32", "k must be .* with b, t and d of q"),
        (1, (2, 2, 3, 8), "float16", "k must have the dtype of q"),
        (2, (2, 3, 4), "float32", r"cos must be \[b, t, d\] or \[1, t, d\] of q"),
        (2, (3, 3, 8), "float32", "cos must be"),
        (3, (1, 3, 8), "float32", "sin must have the shape of cos"),
        (3, (2, 3, 8), "bfloat16", "sin must have the dtype of q"),
    ],
)
def test_wrong_arguments(which: int, shape: tuple[int, ...], dtype: str, message: str) -> None:
    arguments = drawn((2, 4, 2, 3, 8), torch.float32, "cpu")
    arguments[which] = torch.zeros(shape, dtype=getattr(torch, dtype))
    with pytest.raises(ValueError, match=message):
        rope(*arguments)


def test_the_bytes_depend_on_no_thread() -> None:
    arguments = drawn((2, 8, 2, 301, 128), torch.bfloat16, "cpu")
    found = []
    for count in (1, 2, 3):
        with with_threads(count):
            found.append(rope(*arguments))
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(other, found[0], strict=True))


def test_a_backward_pass_raises(device: str) -> None:
    q, *others = drawn((1, 2, 1, 3, 8), torch.float32, device)
    with pytest.raises(RuntimeError, match="not implemented"):
        rope(q.requires_grad_(), *others)[0].sum().backward()


@pytest.mark.slow
def test_torch_accepts_the_op_and_compiles_it(device: str) -> None:
    arguments = drawn((2, 4, 2, 3, 8), torch.float32, device)
    torch.library.opcheck(torch.ops.drot.rope.default, arguments)
    compiled = torch.compile(lambda *a: rope(*a)[0] + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments), rope(*arguments)[0] + 1)
