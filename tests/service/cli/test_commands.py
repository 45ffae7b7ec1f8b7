"""The command line: what it offers, what it passes on, and how it complains."""

import hashlib
import importlib.util
import resource
import subprocess
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import version

import normload.cli
import normserve
import normserve.process.owner_server
import pytest
from normserve.admission.keys import parse_keys
from normserve.cli.commands import main
from normserve.grpc import gateway
from normserve.grpc.server_client import MAX_SERVER_CONNECTIONS
from normserve.settings import REMOVED, Settings


@pytest.fixture
def served(monkeypatch):
    """Settings that `serve` was called with."""
    calls = []
    monkeypatch.setattr(normserve.process.owner_server, "run_server", lambda settings: calls.append(settings) or 7)
    return calls


def test_version(capsys):
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"normserve {normserve.__version__}\n"
    assert version("normserve") == normserve.__version__


@pytest.mark.parametrize(("command", "name"), [(main, "normserve"), (normload.cli.main, "normload")])
def test_the_option_prints_it_too(capsys, command, name):
    with pytest.raises(SystemExit) as caught:
        command(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"{name} {normserve.__version__}\n"


def test_module_is_the_command_and_loads_no_torch():
    command = [sys.executable, "-X", "importtime", "-m", "normserve", "version"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert (run.returncode, run.stdout.split()[0]) == (0, "normserve")
    imported = [line.rpartition("|")[2].strip() for line in run.stderr.splitlines()]
    assert "normserve.cli.commands" in imported
    assert "torch" not in imported


def test_help_shows_every_setting(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--help"])
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name, field in Settings.model_fields.items():
        assert "--" + name.replace("_", "-") in shown
        assert field.description in shown, name


def test_help_shows_the_commands(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "serve" in shown
    assert "version" in shown


@pytest.mark.parametrize("name", REMOVED)
@pytest.mark.parametrize("spelling", ["--{}", "--no-{}", "--{}=1"])
def test_an_option_of_an_earlier_version_is_refused_in_one_line(capsys, served, name, spelling):
    assert main(["serve", spelling.format(name.replace("_", "-"))]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert REMOVED[name] in line
    assert not served


def test_a_variable_that_is_no_setting_is_a_warning(served, monkeypatch, caplog):
    monkeypatch.setenv("NORMSERVE_PROT", "9000")
    monkeypatch.setenv("NORMSERVE_qqqqqqqqqqqqqqqqqqqqqqqqq", "1")
    monkeypatch.setenv("NORMSERVE_LOG_LEVEL", "info")
    assert main(["serve"]) == 7
    assert [record.getMessage() for record in caplog.records if "setting" in record.getMessage()] == [
        "'NORMSERVE_PROT' is not a setting; NORMSERVE_PORT is one",
        "'NORMSERVE_qqqqqqqqqqqqqqqqqqqqqqqqq' is not a setting",
    ]


def test_options_reach_the_server(served):
    assert main(["serve", "--port", "0", "--checkpoint", "a.safetensors", "--max-body-bytes", "5"]) == 7
    assert (served[0].port, str(served[0].checkpoint), served[0].max_body_bytes) == (0, "a.safetensors", 5)


def test_option_wins_over_the_environment(served, monkeypatch):
    monkeypatch.setenv("NORMSERVE_PORT", "1")
    monkeypatch.setenv("NORMSERVE_BACKEND", "torch")
    main(["serve", "--port", "2"])
    assert (served[0].port, served[0].backend) == (2, "torch")


def test_wrong_value_names_its_option(served, capsys):
    assert main(["serve", "--port", "many"]) == 2
    assert "--port (NORMSERVE_PORT)" in capsys.readouterr().err
    assert not served


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--local-users", "me", "numeric user ids"),
        ("--oip-shared-memory", "/x", "A-Z a-z 0-9 . _ -"),
        ("--devices", "gpu", "numbers of CUDA devices, or cpu"),
        ("--frontends", "many", "auto or a number"),
        ("--allowed-hosts", "a:80/b", "names and addresses"),
        ("--cors-origins", "app.example", "origins without a path"),
        ("--warm-sizes", "0", "whole numbers above 0"),
        ("--max-body-bytes", "1G", "512MiB"),
    ],
)
def test_an_error_says_in_words_what_is_expected_and_what_came(served, capsys, option, value, expected):
    assert main(["serve", option, value]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"normserve serve: {option} (NORMSERVE_")
    assert expected in error
    assert error.endswith(f"got {value!r}\n")
    assert not set("^${}\\") & set(error)
    assert not served


def test_an_address_that_may_hold_a_password_is_not_repeated(served, capsys):
    assert main(["serve", "--trace-endpoint", "http://user:s3cret@collector/?key=s3cret"]) == 2
    error = capsys.readouterr().err
    assert "must be a URL without user, password or query" in error
    assert "s3cret" not in error
    assert not served


def test_a_new_key_is_shown_once_and_its_entry_can_be_appended(capsys):
    assert main(["api-key", "team-1"]) == 0
    shown = capsys.readouterr()
    (key,) = parse_keys(shown.out.encode())
    secret = shown.err.split()[-1]
    assert (key.name, key.digest) == ("team-1", hashlib.sha256(secret.encode()).digest())
    assert secret not in shown.out


def test_a_key_needs_a_name_that_it_can_have(capsys):
    assert main(["api-key", "two words"]) == 2
    shown = capsys.readouterr()
    assert "normserve api-key: a key's name must be" in shown.err
    assert shown.out == ""


def test_keys_that_cannot_be_read_end_the_start(served, tmp_path, capsys):
    path = tmp_path / "keys.toml"
    path.write_text("[[keys]]")
    assert main(["serve", "--api-keys-file", str(path)]) == 2
    assert f"--api-keys-file (NORMSERVE_API_KEYS_FILE): {path}: keys[0].name" in capsys.readouterr().err
    assert not served


def test_what_contradicts_is_told_without_an_option(served, capsys):
    assert main(["serve", "--api-key", "s3cret", "--api-keys-file", "keys.toml"]) == 2
    error = capsys.readouterr().err
    assert "must not be given together" in error
    assert "s3cret" not in error
    assert not served


def test_a_switch_takes_no_value(served):
    main(["serve", "--access-log"])
    main(["serve", "--no-access-log"])
    main(["serve"])
    assert [settings.access_log for settings in served] == [True, False, False]


@pytest.mark.parametrize("arguments", [[], ["server"], ["serve", "--prot", "1"]])
def test_wrong_words_show_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: normserve" in capsys.readouterr().err


@pytest.mark.parametrize("missing", [None, ModuleNotFoundError("opentelemetry.exporter")])
def test_traces_without_their_extra_are_refused_at_once(served, capsys, monkeypatch, missing):
    """Whether the parent packages are there or not."""

    find_spec = importlib.util.find_spec

    def find(name: str) -> ModuleSpec | None:
        if not name.startswith("opentelemetry"):
            return find_spec(name)
        if missing is not None:
            raise missing
        return None

    monkeypatch.setattr("importlib.util.find_spec", find)
    assert main(["serve", "--trace-endpoint", "http://localhost:4318"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'normserve[otel]'" in line
    assert not served
    assert main(["serve"]) == 7


def test_traces_need_nothing_that_is_not_asked_for():
    """The SDK is loaded where there is an endpoint, and by no other server."""
    script = (
        "import sys\n"
        "from normserve.http.app import create_app\n"
        "from normserve.settings import Settings\n"
        "create_app(Settings(backend='torch'))\n"
        "assert 'opentelemetry.sdk' not in sys.modules\n"
        "create_app(Settings(backend='torch', trace_endpoint='http://localhost:4318'))\n"
        "assert 'opentelemetry.sdk' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_a_gateway_raises_its_limit_of_open_files(monkeypatch):
    """Each of its calls may have a connection to the server beside the client's."""
    limits, ran = [(1024, 20000)], []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, limit: limits.append(limit))
    monkeypatch.setattr(gateway, "run_gateway", ran.append)
    assert (
        main(["grpc", "--listen", "127.0.0.1:0", "--server", "http://127.0.0.1:1", "--max-connections", "2000"])
        == 0
    )
    assert [each.max_connections for each in ran] == [2000]
    assert limits[-1][0] >= 2000 + MAX_SERVER_CONNECTIONS
