"""A server does what an earlier one was recorded to do: the quick part of `python -m tests.corpus replay`."""

import pytest

from tests.corpus.__main__ import main
from tests.corpus.recordings import FOLDER, path_of
from tests.corpus.replays import replay
from tests.corpus.scenes import RECORDED


@pytest.mark.parametrize("transport", ["http", "http front ends", "v2 shared memory", "local", "local device"])
def test_calls_are_answered_as_recorded(transport):
    found = replay("calls", transport)
    assert not found, "\n".join(found)


def test_words_that_no_scene_has_are_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["corpus", "replay", "calls", "layers"])
    with pytest.raises(SystemExit):
        main()
    assert "no scene and transport contain all of calls layers" in capsys.readouterr().err


def test_every_recording_is_replayed():
    assert {path_of(*each) for each in RECORDED} == set(FOLDER.iterdir())
