import sys

from benchmarks.plots.__main__ import main


def test_charts_are_written_beside_plots(path, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plots", str(path), "--out", str(tmp_path / "out")])
    main()
    assert capsys.readouterr().out.split() == [str(tmp_path / "out" / "group_norm-forward-silu-bfloat16.png")]
    assert (tmp_path / "out" / "group_norm-forward-silu-bfloat16.png").exists()
