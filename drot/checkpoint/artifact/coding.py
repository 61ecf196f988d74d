"""The difference between a piece of a checkpoint's tensor and its prediction, as bytes that compress well.

Floating-point values are counted: the number of a value is its place among all values of its dtype, 0 for +0,
-1 for -0. Neighbouring values have neighbouring numbers, so a small change is a small number. Compared with
the exclusive or of the bits, the differences take about a tenth less.

- `mask`: one bit a weight, 1 where the checkpoint holds +0.
- `difference`: for all other weights, the number of the checkpoint's value less that of the prediction.
- `unsure`: weights whose prediction lies so near to the middle between two values that another machine may
  round it to the other value, and which of the two values was meant.

A part without content is left out.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: dtype of the tensor → integer dtype of the same size
INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
#: A mask is stored from this share of zeros on.
LEAST_ZEROS = 0.01
#: what `unsure` says of a weight: its number is even, it is odd, or the prediction counts as 0
EVEN, ODD, ZERO = 0, 1, 2

Numbers = NDArray[np.int64]


def numbers_of(tensor: Tensor) -> Numbers:
    """The number of each value of a tensor with a dtype in INTEGERS."""
    bits = tensor.contiguous().view(INTEGERS[tensor.dtype]).numpy().astype(np.int64)
    low = bits & (_half(tensor.dtype) - 1)
    return np.where(bits < 0, -1 - low, low)


def values_of(numbers: Numbers, dtype: torch.dtype) -> Tensor:
    """The inverse of `numbers_of`."""
    bits = np.where(numbers < 0, -1 - numbers - _half(dtype), numbers)
    small = bits.astype(np.int16 if INTEGERS[dtype] == torch.int16 else np.int32)
    return torch.from_numpy(small).view(dtype)


def _half(dtype: torch.dtype) -> int:
    """Half of the count of numbers: 2 ** 15 or 2 ** 31."""
    return 1 << (8 * dtype.itemsize - 1)


def _rounded(values: Tensor, dtype: torch.dtype) -> Numbers:
    return numbers_of(values.float().to(dtype))  # in two steps on every machine and with every torch


def encode(actual: Tensor, predicted: Tensor, tolerance: float) -> dict[str, bytes]:
    """The parts of a piece.

    actual: the checkpoint's values, of a dtype in INTEGERS.
    predicted: the prediction in fp64, of the same shape.
    tolerance: by how much the prediction may differ on another machine.
    """
    dtype, parts = actual.dtype, {}
    found, expected = numbers_of(actual).reshape(-1), predicted.reshape(-1)
    kept = found != 0
    if 1 - kept.mean() >= LEAST_ZEROS:
        parts["mask"] = np.packbits(~kept).tobytes()
        found, expected = found[kept], expected[torch.from_numpy(kept)]
    numbers, unsure = _prediction(expected, dtype, tolerance)
    if len(unsure):
        parts["unsure"] = unsure.tobytes()
    half = _half(dtype)
    difference = (found - numbers + half) % (2 * half) - half
    if difference.any():
        parts["difference"] = to_planes(np.where(difference < 0, -1 - 2 * difference, 2 * difference), dtype)
    return parts


def decode(parts: dict[str, bytes], predicted: Tensor, tolerance: float, dtype: torch.dtype) -> Tensor:
    """The inverse of `encode`: the checkpoint's values, in the shape of `predicted`.

    Raises ValueError if the sizes of the parts do not fit the shape.
    """
    expected = predicted.reshape(-1)
    kept = np.ones(len(expected), dtype=bool)
    if "mask" in parts:
        bits = np.frombuffer(parts["mask"], np.uint8)
        kept = ~np.unpackbits(bits, count=len(expected)).astype(bool)
        if len(kept) != len(expected):
            raise ValueError("the mask has another size")
    expected = expected[torch.from_numpy(kept)]
    numbers = _resolve(expected, parts.get("unsure", b""), dtype, tolerance)
    if "difference" in parts:
        coded = from_planes(parts["difference"], dtype)
        if len(coded) != len(numbers):
            raise ValueError("the differences have another size")
        half = _half(dtype)
        difference = np.where(coded % 2 == 1, -(coded + 1) // 2, coded // 2)
        numbers = (numbers + difference + half) % (2 * half) - half
    result = np.zeros(len(kept), dtype=np.int64)
    result[kept] = numbers
    return values_of(result, dtype).reshape(predicted.shape)


def _prediction(expected: Tensor, dtype: torch.dtype, tolerance: float) -> tuple[Numbers, NDArray[Any]]:
    """The numbers of the rounded prediction, and the part `unsure`: gaps between indices, and what they are.

    An index is listed if a change by `tolerance` could change its number. ZERO is for a prediction so near to
    0 that more than two numbers are possible.
    """
    numbers = _rounded(expected, dtype)
    if tolerance == 0:
        return numbers, np.empty((2, 0), dtype="<i8")
    listed = np.flatnonzero(_rounded(expected - tolerance, dtype) != _rounded(expected + tolerance, dtype))
    near = expected[torch.from_numpy(listed)]
    wide = _rounded(near + 2 * tolerance, dtype) - _rounded(near - 2 * tolerance, dtype) > 1
    numbers[listed[wide]] = 0
    kinds = np.where(wide, ZERO, numbers[listed] % 2)
    return numbers, np.stack([np.diff(listed, prepend=0), kinds]).astype("<i8")


def _resolve(expected: Tensor, unsure: bytes, dtype: torch.dtype, tolerance: float) -> Numbers:
    """The numbers that `_prediction` returned on the machine that wrote `unsure`."""
    numbers = _rounded(expected, dtype)
    gaps, kinds = np.frombuffer(unsure, "<i8").reshape(2, -1)
    listed = np.cumsum(gaps)
    if len(listed) and not (listed.min() >= 0 and listed.max() < len(numbers)):
        raise ValueError("an index lies outside of the tensor")
    near = expected[torch.from_numpy(listed)]
    low, high = _rounded(near - tolerance, dtype), _rounded(near + tolerance, dtype)
    numbers[listed] = np.where(kinds == ZERO, 0, np.where(low % 2 == kinds, low, high))
    return numbers


def to_planes(numbers: Numbers, dtype: torch.dtype) -> bytes:
    """Unsigned `numbers` of the size of `dtype`: all lowest bytes, then all second bytes, and so on.

    The high bytes are nearly all equal, and compress well next to each other.
    """
    size = dtype.itemsize
    whole = numbers.astype(f"<u{size}").view(np.uint8).reshape(-1, size)
    return np.ascontiguousarray(whole.T).tobytes()


def from_planes(data: bytes, dtype: torch.dtype) -> Numbers:
    """The inverse of `to_planes`."""
    size = dtype.itemsize
    planes = np.frombuffer(data, np.uint8).reshape(size, -1)
    return np.ascontiguousarray(planes.T).view(f"<u{size}").reshape(-1).astype(np.int64)
