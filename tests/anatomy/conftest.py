"""The tiny models, built once."""

from typing import Any

import pytest

from .tiny import FAMILIES, tiny_vlm


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Each family in turn."""
    return str(request.param)


@pytest.fixture(scope="session")
def vlm(family: str) -> Any:
    """(model, processor, inputs) of the family."""
    return tiny_vlm(family)
