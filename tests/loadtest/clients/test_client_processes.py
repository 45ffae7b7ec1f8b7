import multiprocessing

import pytest
from normload.clients import client_worker
from normload.clients.client_processes import ClientProcessError, ClientProcesses, split_evenly
from normload.clients.client_worker import WorkerSetup

from tests.loadtest.conftest import WORKLOAD


def test_connections_are_shared_out_evenly():
    assert split_evenly(7, 3) == [3, 2, 2]
    assert split_evenly(1, 2) == [1, 0]


def test_a_process_that_cannot_begin_says_why():
    setup = WorkerSetup("http://127.0.0.1:9", "no such adapter", None, 1.0, WORKLOAD.draw_cases(0), 0, 0.0, 0, 1)
    with (
        ClientProcesses(setup, lambda _: None) as fleet,
        pytest.raises(ClientProcessError, match="KeyError: 'no such adapter'"),
    ):
        fleet.wait_until_ready()


def test_a_process_that_cannot_begin_after_its_parent_has_ended_is_silent():
    setup = WorkerSetup("http://127.0.0.1:9", "no such adapter", None, 1.0, WORKLOAD.draw_cases(0), 0, 0.0, 0, 1)
    ours, theirs = multiprocessing.Pipe()
    ours.close()
    client_worker.main(setup, theirs)


def test_a_process_that_dies_is_noticed():
    setup = WorkerSetup("http://127.0.0.1:9", "normserve", None, 1.0, WORKLOAD.draw_cases(0), 0, 0.0, 0, 1)
    with ClientProcesses(setup, lambda _: None) as fleet:
        fleet.wait_until_ready()
        fleet._running[0].kill()
        with pytest.raises(ClientProcessError, match="ended unexpectedly"):
            fleet.send_each_once()
