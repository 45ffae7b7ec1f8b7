"""When a process of a fleet is told to read its TLS files again."""

import signal
import socket

import pytest
from normserve.process import child
from normserve.process.child import OWNER, ChildSlot
from normserve.process.supervisor_channel import MESSAGE, NOT_READY, READY, ReportReader


class Running:
    """Stands for a subprocess."""

    pid = 4711

    def __init__(self):
        self.returncode = None
        self.signals = []


@pytest.fixture
def process(monkeypatch):
    monkeypatch.setattr(child.os, "kill", lambda pid, number: made._subprocess.signals.append(number))
    made = ChildSlot("process 0", OWNER, lambda restarts: restarts, "cpu", hang_s=20)
    made._subprocess = Running()
    return made


@pytest.fixture
def said(process):
    """Has the process say something."""
    here, there = socket.socketpair()
    with here, there:

        def say(what):
            there.send(MESSAGE.pack(what))
            process._receive_reports(here, ReportReader())

        yield say


@pytest.mark.parametrize("first", [READY, NOT_READY])
def test_one_that_starts_is_told_once_it_minds_signals(process, said, first):
    """Before, the signal would end it; and it may have read the old files already."""
    process.request_tls_reload()
    process.request_tls_reload()
    assert process._subprocess.signals == []
    said(first)
    assert process._subprocess.signals == [signal.SIGHUP]
    said(READY)
    assert process._subprocess.signals == [signal.SIGHUP]


def test_one_that_runs_is_told_at_once(process, said):
    said(READY)
    process.request_tls_reload()
    assert process._subprocess.signals == [signal.SIGHUP]


def test_one_that_has_ended_is_not_told(process, said):
    said(READY)
    process._subprocess.returncode = 1
    process.request_tls_reload()
    assert process._subprocess.signals == []
