"""Whose words are logged."""

import logging

import pytest
from normserve.logs.formatting import configure_logging


@pytest.fixture
def levels():
    """Puts back what every test of the run shares."""
    names = ("", "normserve", "fusednorm", "uvicorn", "normserve.audit", "normserve.access")
    loggers = [logging.getLogger(name) for name in names]
    before = [(each, each.level, list(each.handlers)) for each in loggers]
    logging.getLogger().handlers.clear()
    yield
    for each, level, handlers in before:
        each.setLevel(level)
        each.handlers[:] = handlers


@pytest.mark.parametrize(
    ("level", "own", "others"),
    [
        ("debug", logging.DEBUG, logging.WARNING),
        ("info", logging.INFO, logging.WARNING),
        ("warning", logging.WARNING, logging.WARNING),
        ("error", logging.ERROR, logging.ERROR),
    ],
)
def test_others_are_heard_from_warnings_on(levels, level, own, others):
    configure_logging(level)
    assert logging.getLogger("normserve.process.supervisor").getEffectiveLevel() == own
    assert logging.getLogger("fusednorm.launch.launches").getEffectiveLevel() == own
    for name in ("httpx", "asyncio", "another.library"):
        assert logging.getLogger(name).getEffectiveLevel() == others
    assert logging.getLogger("uvicorn.error").getEffectiveLevel() == logging.ERROR
