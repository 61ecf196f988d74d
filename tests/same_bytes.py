"""Numbers of threads, with which some results have the same bytes."""

import contextlib
import functools
from collections.abc import Iterator

import pytest
import torch

NUMBERS_OF_THREADS = (1, 2, 4)


@contextlib.contextmanager
def with_threads(count: int) -> Iterator[None]:
    """A block in which torch has `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def products_have_the_same_bytes() -> bool:
    """Whether the products of this machine do not depend on the number of threads, for multiples of 64.

    They do not with MKL on the machines that we have tried. MKL does not promise it without MKL_CBWR.
    """
    generator = torch.Generator().manual_seed(0)
    for rows, inner, columns in ((64, 64, 64), (256, 64, 128), (128, 1024, 64), (256, 512, 256)):
        a = torch.randn(rows, inner, generator=generator)
        b = torch.randn(inner, columns, generator=generator)
        found = []
        for count in NUMBERS_OF_THREADS:
            with with_threads(count):
                found.append(a @ b)
        if not all(torch.equal(product, found[0]) for product in found):
            return False
    return True


def threads(count: int) -> contextlib.AbstractContextManager[None]:
    """A context with `count` threads of torch. Skips the test where even products depend on the number."""
    if not products_have_the_same_bytes():
        pytest.skip("the matrix products of this machine depend on the number of threads")
    return with_threads(count)
