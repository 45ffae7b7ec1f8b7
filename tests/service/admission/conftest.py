"""What the tests of admission share."""

import pytest


@pytest.fixture
def now() -> list[float]:
    return [100.0]
