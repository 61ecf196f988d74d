"""Fixtures that every test shares."""

import pytest
import torch


def devices() -> list[str]:
    """Every test of an op runs on each of these."""
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=devices())
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same numbers, whatever ran before it."""
    torch.manual_seed(0)
