"""Settings come from where they should, once, and never change."""

import json
from pathlib import Path

import pytest
from normserve.settings import REMOVED, Settings
from pydantic import ValidationError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in Settings.model_fields:
        monkeypatch.delenv(f"NORMSERVE_{name.upper()}", raising=False)


def test_environment_sets(monkeypatch):
    monkeypatch.setenv("NORMSERVE_PORT", "9000")
    assert Settings().port == 9000
    assert Settings(port=9001).port == 9001


def test_settings_are_frozen():
    with pytest.raises(ValidationError):
        Settings().port = 1


def test_every_setting_says_what_it_is():
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70_000},
        {"backend": "cuda"},
        {"max_body_bytes": 0},
        {"timeout_ms": 0},
        {"api_key": ""},
        {"api_key": "a", "api_keys_file": "keys.toml"},
        {"log_format": "xml"},
        {"unknown": 1},
        {"cpu_threads": 100_000},
        {"local_users": "me"},
        {"devices": "0,gpu"},
        {"devices": "\u0661"},
        {"frontends": "many"},
        {"allowed_hosts": "https://a.test"},
        {"cors_origins": "app.example"},
        {"warm_sizes": "768,"},
        {"warm_sizes": "768\n"},
        {"warm_sizes": ""},
        {"drain_s": -1},
        {"drain_s": "nan"},
        {"keep_alive_s": "inf"},
        {"drain_delay_s": -1},
        {"drain_delay_s": "inf"},
        {"drain_delay_s": "nan"},
        {"drain_delay_s": 3601},
        {"trusted_proxies": "proxy.example"},
        {"trusted_proxies": "10.0.0.5/8"},
        {"trusted_proxies": "10.0.0.0/8, fd00::/8"},
        {"trusted_proxies": "10.0.0.0/8,"},
        {"trusted_proxies": "::ffff:10.0.0.0/104"},
        {"trusted_proxies": "fd00::/8,::ffff:10.0.0.1"},
        {"root_path": "norm"},
        {"root_path": "/norm/"},
        {"root_path": "/"},
        {"root_path": "/no?rm"},
        {"oip_shared_memory": "/dev/shm/"},
        {"oip_shared_memory": "a/b"},
        {"oip_shared_memory": ".."},
        {"oip_shared_memory": "a\n"},
    ],
)
def test_nonsense_is_refused(wrong):
    with pytest.raises(ValidationError):
        Settings(**wrong)


@pytest.mark.parametrize("name", REMOVED)
@pytest.mark.parametrize("value", ["true", ""])
def test_a_setting_of_an_earlier_version_is_refused_with_what_to_do_instead(monkeypatch, name, value):
    assert name not in Settings.model_fields
    with pytest.raises(ValidationError, match=r"no longer exists; leave it out: \w+"):
        Settings(**{name: value})
    monkeypatch.setenv(f"normserve_{name}", value)
    with pytest.raises(ValidationError, match=f"NORMSERVE_{name.upper()}"):
        Settings()


def test_two_protocols_have_two_sockets():
    with pytest.raises(ValidationError, match="--uds and --local must be two paths"):
        Settings(uds="a.sock", local="./a.sock")
    with pytest.raises(ValidationError, match="--uds and --local must be two paths"):
        Settings(uds="a.sock", local=Path.cwd() / "a.sock")
    assert Settings(uds="a.sock", local="b.sock").local == Path("b.sock")


def test_api_key_is_not_shown():
    assert "s3cret" not in repr(Settings(api_key="s3cret"))


def test_what_is_shown_has_every_setting_and_no_secret():
    shown = Settings(api_key="s3cret", checkpoint="a.safetensors").dump_masked()
    assert shown.keys() == Settings.model_fields.keys()
    assert shown["checkpoint"] == "a.safetensors"
    assert "s3cret" not in json.dumps(shown)


def test_regions_are_registered_with_one_process():
    assert Settings(oip_shared_memory="norms-", devices="0").oip_shared_memory == "norms-"
    with pytest.raises(ValidationError, match="--oip-shared-memory needs one process"):
        Settings(oip_shared_memory="norms-", devices="0,1")
    assert Settings(oip_cuda_shared_memory=True, devices="0").oip_cuda_shared_memory
    with pytest.raises(ValidationError, match="--oip-cuda-shared-memory needs one process"):
        Settings(oip_cuda_shared_memory=True, devices="0,1")


@pytest.mark.parametrize(
    ("said", "nbytes"),
    [
        ("1GiB", 2**30),
        ("1.5 MiB", 3 * 2**19),
        ("2GB", 2 * 10**9),
        (" 512KiB ", 2**19),
        ("0.3KB", 300),
        ("7", 7),
        (7, 7),
        ("9TiB", 9 * 2**40),
    ],
)
def test_sizes_may_have_a_unit(said, nbytes):
    assert Settings(max_body_bytes=said).max_body_bytes == nbytes


@pytest.mark.parametrize(
    "said", ["1G", "GiB", "-1GiB", "1e3MiB", "1gib", "1GiB2", "\u0661GiB", "0.0001KiB", "9" * 19 + "KB"]
)
def test_other_sizes_are_refused(said):
    with pytest.raises(ValidationError):
        Settings(max_body_bytes=said)


@pytest.mark.parametrize("endpoint", ["http://collector:4318", "https://a.test/v1/traces", "http://[::1]:4318/"])
def test_a_trace_endpoint_is_a_url(endpoint):
    assert Settings(trace_endpoint=endpoint).trace_endpoint == endpoint


@pytest.mark.parametrize(
    "endpoint", ["collector:4318", "grpc://a:4317", "http://user:secret@a", "http://a/?key=b", ""]
)
def test_no_trace_endpoint_carries_what_the_log_must_not_show(endpoint):
    with pytest.raises(ValidationError):
        Settings(trace_endpoint=endpoint)
