import pytest
from fusednorm.launch import call_status, extension_calls, replay_cache
from triton import knobs


@pytest.fixture
def extension(monkeypatch):
    """What is known of the extension, as a process on a GPU finds it."""
    monkeypatch.setattr(call_status, "INTERPRETED", False)
    monkeypatch.setattr(replay_cache, "_extension", None)
    monkeypatch.setattr(replay_cache, "_load", lambda may_build: None)

    def set_to(is_there, path_or_reason):
        monkeypatch.setattr(call_status, "find_extension_status", lambda: (is_there, path_or_reason))

    return set_to


def test_an_extension_that_is_there_will_be_used(extension):
    extension(True, "/cache/it.so")
    assert (
        call_status.describe_repeated_calls()
        == "repeated calls on a GPU are made by the host extension: /cache/it.so"
    )


def test_without_one_python_makes_them_and_it_is_said_why(extension):
    extension(False, "it is being compiled")
    assert (
        call_status.describe_repeated_calls() == "repeated calls on a GPU are made by Python: it is being compiled"
    )


def test_a_process_that_does_without_it_says_so(extension):
    extension(True, "/cache/it.so")
    replay_cache.set_extension(None)
    assert call_status.describe_repeated_calls().endswith("by Python: this process does not use the host extension")


def test_one_in_use_is_named(extension, monkeypatch):
    extension(True, "/cache/it.so")
    monkeypatch.setattr(replay_cache, "_load", None)
    monkeypatch.setattr(replay_cache, "_extension", object())
    assert (
        call_status.describe_repeated_calls()
        == "repeated calls on a GPU are made by the host extension: /cache/it.so"
    )


@pytest.mark.parametrize("why", ["kernels are interpreted", "Triton's hooks or debug settings see each launch"])
def test_what_prevents_replays_is_named(why, extension, monkeypatch):
    extension(True, "/cache/it.so")
    if "interpreted" in why:
        monkeypatch.setattr(call_status, "INTERPRETED", True)
    else:
        monkeypatch.setattr(knobs.runtime, "debug", True)
    assert call_status.describe_repeated_calls() == f"repeated calls on a GPU are planned anew: {why}"


def test_a_folder_that_cannot_be_trusted_is_named(monkeypatch):
    class Files:
        def find_compiled(self):
            raise PermissionError("expected it to be writable by its user alone")

    monkeypatch.setattr(extension_calls, "_files", Files())
    monkeypatch.setattr(extension_calls, "_load_error", "")
    is_there, reason = extension_calls.find_extension_status()
    assert not is_there
    assert "expected it to be writable by its user alone" in reason
