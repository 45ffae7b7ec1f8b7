"""What a crash report has in it, and what it has not."""

import logging
from importlib import metadata

import pytest
from normserve.logs import crash
from normserve.settings import Settings


@pytest.fixture
def told(caplog):
    """The fields of the report that was told last."""
    caplog.set_level(logging.INFO, "normserve.crash")

    def tell(**more: object) -> dict[str, object]:
        facts = {"version": "1.2.3", "settings": {}, "device": None, "work": None, "trace": None, **more}
        crash.log_crash_report("it failed", **facts)
        assert caplog.records[-1].levelno == logging.CRITICAL
        return caplog.records[-1].fields

    return tell


def test_it_names_every_version(told):
    fields = told()
    assert (fields["what"], fields["version"]) == ("it failed", "1.2.3")
    assert {"python", "numpy", "torch"} <= fields["versions"].keys()
    assert fields["versions"]["torch"] == metadata.version("torch")
    assert fields["platform"].startswith("Linux")


def test_the_driver_is_named_where_there_is_one(told, monkeypatch, tmp_path):
    monkeypatch.setattr(crash, "_DRIVER", tmp_path / "version")
    assert "nvidia_driver" not in told()["versions"]
    (tmp_path / "version").write_text("570.86.15\n")
    assert told()["versions"]["nvidia_driver"] == "570.86.15"


def test_a_package_that_is_not_there_is_not_named(told, monkeypatch):
    monkeypatch.setattr(crash, "_PACKAGES", ("numpy", "no-such-package-anywhere"))
    assert told()["versions"].keys() - {"nvidia_driver"} == {"python", "numpy"}


def test_what_is_not_known_is_left_out(told):
    assert not {"device", "work", "traceback"} & told().keys()
    fields = told(device="a GPU", work="a launch", trace="Traceback")
    assert (fields["device"], fields["work"], fields["traceback"]) == ("a GPU", "a launch", "Traceback")


def test_settings_are_those_that_were_changed_without_secrets(told):
    fields = told(settings=Settings(port=9000, api_key="a-secret").dump_changed())
    assert fields["settings"]["port"] == 9000
    assert "max_body_bytes" not in fields["settings"]
    assert "a-secret" not in str(fields)
