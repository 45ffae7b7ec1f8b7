import sys

from benchmarks.harness.progress import ProgressDisplay


def test_lines_where_stderr_is_no_terminal(capsys):
    with ProgressDisplay(2) as progress:
        progress.finish_step("one")
        progress.print_line("a word")
        progress.finish_step("two")
    assert capsys.readouterr().err == "[1/2] one\na word\n[2/2] two\n"


def test_a_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with ProgressDisplay(1) as progress:
        progress.finish_step("[layer_norm] is no markup")
    text = capsys.readouterr().err
    assert "[1/1] [layer_norm] is no markup" in text
    assert "━" in text
