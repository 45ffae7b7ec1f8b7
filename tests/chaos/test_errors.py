"""What a log says of errors, of which some lead to others."""

import traceback

from tests.chaos.__main__ import errors_in, is_want_of_memory


def logged(*errors):
    """The lines of a traceback in which each error was raised while the one before it was handled."""
    try:
        try:
            raise errors[-1]
        except type(errors[-1]):
            if len(errors) > 1:
                raise errors[-2] from errors[-1]
            raise
    except Exception:
        return traceback.format_exc().splitlines()


def test_the_last_of_a_chain_counts():
    lines = ["--- Logging error ---", *logged(MemoryError(), TimeoutError("late"))]
    (error,) = errors_in(lines)
    assert is_want_of_memory(error)


def test_each_error_alone_is_counted():
    lines = [*logged(TimeoutError("late")), *logged(MemoryError(), KeyError("a")), *logged(TimeoutError("late"))]
    found = {error.split(" ")[0]: len(texts) for error, texts in errors_in(lines).items()}
    assert found == {"TimeoutError:": 2, "MemoryError": 1}
    assert "Traceback" in errors_in(lines)[next(iter(errors_in(lines)))][0]
    assert errors_in(["all is well"]) == {}
