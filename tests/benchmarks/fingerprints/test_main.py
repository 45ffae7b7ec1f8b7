import pytest
from fusednorm.devices.device_properties import INTERPRETED

from benchmarks.fingerprints.__main__ import main


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter is for machines without a GPU")
def test_nothing_is_written_in_the_interpreter_and_for_parts_that_are_none(tmp_path, capsys):
    for parts in (["launches"], ["unknown"], ["show"]):
        with pytest.raises(SystemExit):
            main([*parts, "--out", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []
    assert "TRITON_INTERPRET" in capsys.readouterr().err
