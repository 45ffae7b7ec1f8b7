"""TLS files: what is refused before a server starts, and what a reload may change."""

import os
import ssl

import normserve.process.owner_server
import normserve.process.supervisor
import pytest
from cryptography.hazmat.primitives import serialization
from normserve.cli.commands import main
from normserve.process.tls import TlsContext, TlsFileError, TlsFiles
from normserve.settings import Settings

from tests.certificates import Certificates


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("theirs"))


@pytest.fixture
def started(monkeypatch):
    calls = []
    monkeypatch.setattr(normserve.process.owner_server, "run_server", calls.append)
    monkeypatch.setattr(normserve.process.supervisor, "serve_fleet", calls.append)
    return calls


def encrypted(ours, path):
    key = serialization.load_pem_private_key(ours.key.read_bytes(), None)
    password = serialization.BestAvailableEncryption(b"secret")
    form = serialization.PrivateFormat.PKCS8
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, password))
    return path


def test_right_files_start(ours, started):
    assert main(["serve", *ours.options(), "--tls-client-ca", str(ours.ca)]) is None
    assert len(started) == 1


def test_one_file_may_hold_both(ours, started, tmp_path):
    both = tmp_path / "both.pem"
    both.write_bytes(ours.key.read_bytes() + ours.cert.read_bytes())
    main(["serve", "--tls-cert", str(both)])
    assert len(started) == 1


@pytest.mark.parametrize(
    ("cert", "key", "client_ca", "option", "says"),
    [
        (None, "ours.key", None, "--tls-key", "needs --tls-cert"),
        (None, None, "ours.ca", "--tls-client-ca", "needs --tls-cert"),
        ("nowhere", "ours.key", None, "--tls-cert", "cannot be read: No such file"),
        ("ours.cert", "nowhere", None, "--tls-key", "cannot be read: No such file"),
        ("ours.cert", "ours.key", "nowhere", "--tls-client-ca", "cannot be read: No such file"),
        ("folder", "ours.key", None, "--tls-cert", "cannot be read: not a regular file"),
        ("pipe", "ours.key", None, "--tls-cert", "cannot be read: not a regular file"),
        ("ours.cert", "pipe", None, "--tls-key", "cannot be read: not a regular file"),
        ("empty", "ours.key", None, "--tls-cert", "holds no certificate"),
        ("ours.key", "ours.key", None, "--tls-cert", "holds no certificate"),
        ("ours.cert", "ours.ca", None, "--tls-key", "holds no private key"),
        ("ours.cert", "empty", None, "--tls-key", "holds no private key"),
        ("ours.cert", None, None, "--tls-cert", "holds no private key"),
        ("ours.cert", "theirs.key", None, "--tls-key", "does not belong to the certificate"),
        ("ours.cert", "encrypted", None, "--tls-key", "the key is encrypted"),
        ("ours.cert", "ours.key", "ours.key", "--tls-client-ca", "holds no certificate"),
    ],
)
def test_wrong_files_are_refused_with_the_reason(
    ours, theirs, started, tmp_path, capsys, cert, key, client_ca, option, says
):
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    encrypted(ours, tmp_path / "encrypted")

    def path(name):
        owner, _, which = name.partition(".")
        return str(getattr({"ours": ours, "theirs": theirs}[owner], which) if which else tmp_path / name)

    given = {"--tls-cert": cert, "--tls-key": key, "--tls-client-ca": client_ca}
    arguments = [part for name, file in given.items() if file for part in (name, path(file))]
    for how in ([], ["--devices", "cpu,cpu"]):
        assert main(["serve", *how, *arguments]) == 2
        complaint = capsys.readouterr().err
        assert complaint.startswith(
            f"normserve serve: {option} (NORMSERVE_{option[2:].upper().replace('-', '_')}): "
        )
        assert says in complaint
    assert started == []


def test_plain_http_has_no_files():
    assert TlsFiles.from_settings(Settings()) is None


def test_old_versions_and_renegotiation_are_off(ours):
    context = TlsFiles(ours.cert, ours.key, None).load_context()
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert context.options & ssl.OP_NO_RENEGOTIATION
    assert context.verify_mode is ssl.CERT_NONE
    assert TlsFiles(ours.cert, ours.key, ours.ca).load_context().verify_mode is ssl.CERT_REQUIRED


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> str:
    """The serial number of the certificate that the client gets, once both agree."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname="localhost"),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    done = set()
    while len(done) < 2:
        for end in ends:
            try:
                end.do_handshake()
                done.add(end)
            except ssl.SSLWantReadError:
                continue
    return ends[0].getpeercert()["serialNumber"]


def test_a_reload_is_for_handshakes_to_come(tmp_path):
    files = Certificates(tmp_path / "files")
    context = TlsContext(TlsFiles(files.cert, files.key, None))
    first = files.serial()
    assert handshake(context, files.trust()) == first
    files.renew()
    assert handshake(context, files.trust()) == first
    context.reload_files()
    assert handshake(context, files.trust()) == files.serial() != first


def test_a_broken_file_changes_nothing(tmp_path):
    files = Certificates(tmp_path / "files")
    context = TlsContext(TlsFiles(files.cert, files.key, None))
    first = files.serial()
    key = files.key.read_bytes()
    files.renew()
    files.key.write_bytes(key)
    with pytest.raises(TlsFileError, match="does not belong"):
        context.reload_files()
    assert handshake(context, files.trust()) == first


def test_who_was_trusted_before_a_reload_is_not_after_it(tmp_path, theirs):
    files = Certificates(tmp_path / "files")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(theirs.ca.read_bytes())
    context = TlsContext(TlsFiles(files.cert, files.key, trusted))
    handshake(context, files.trust(client=theirs.client))
    trusted.write_bytes(files.ca.read_bytes())
    context.reload_files()
    handshake(context, files.trust(client=files.client))
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        handshake(context, files.trust(client=theirs.client))


def test_no_password_is_asked_for_on_a_terminal(ours, tmp_path):
    """OpenSSL would, and a server would wait."""
    key = encrypted(ours, tmp_path / "key")
    with pytest.raises(TlsFileError, match="encrypted"):
        TlsFiles(ours.cert, key, None).load_context()
