"""How a process ended, as the log has it."""

import pytest
from normserve.process.exit_codes import describe_exit


@pytest.mark.parametrize(
    ("code", "told"),
    [(0, {"exit_code": 0}), (3, {"exit_code": 3}), (-9, {"signal": "SIGKILL"}), (-11, {"signal": "SIGSEGV"})],
)
def test_an_end_is_a_code_or_a_signal_by_its_name(code, told):
    assert describe_exit(code) == told


def test_a_signal_without_a_name_is_its_number():
    assert describe_exit(-45) == {"signal": "45"}
