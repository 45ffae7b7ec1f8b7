"""Tickets worked off in parallel processes, some of which do not live to tell."""

import pytest

from tests.kernels.harness.compiled import compile_elsewhere

BEGIN = """
import json, os, signal, sys, time
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

# Without the rest of the library, which takes its time.
(package,) = find_spec("fusednorm").submodule_search_locations
spec = spec_from_file_location("compile_workers", Path(package, "warm", "compile_workers.py"))
sys.modules["workers"] = workers = module_from_spec(spec)
spec.loader.exec_module(workers)
run_tickets = workers.run_tickets

folder = Path(sys.argv[1])

def first_time(ticket):
    try:
        (folder / f"begun-{ticket}").touch(exist_ok=False)
        return True
    except FileExistsError:
        return False

def wanted():
    return True

def outcome(work, tickets, jobs, is_wanted=wanted):
    done = run_tickets(tickets, work, jobs, is_wanted)
    return sorted([each.ticket, each.nbytes, each.was_cached] for each in done)
"""


def run(script, tmp_path):
    return compile_elsewhere(BEGIN + script, str(tmp_path))


@pytest.mark.parametrize("jobs", [1, 2, 9])
def test_each_ticket_is_worked_off_once(jobs, tmp_path):
    script = f"""
def work(ticket):
    assert first_time(ticket)
    return 10 * ticket, ticket == 2
print(json.dumps(outcome(work, range(5), {jobs})))
"""
    assert run(script, tmp_path) == [[ticket, 10 * ticket, ticket == 2] for ticket in range(5)]


def test_more_tickets_than_a_pipe_holds(tmp_path):
    script = "print(len(outcome(lambda ticket: (1, True), range(20_000), 2)))"
    assert run(script, tmp_path) == 20_000


def test_tickets_are_taken_in_order(tmp_path):
    script = """
def work(ticket):
    with (folder / "order").open("a") as order:
        order.write(f"{ticket} ")
    return 0, False
outcome(work, [3, 1, 2], 1)
print(json.dumps((folder / "order").read_text().split()))
"""
    assert run(script, tmp_path) == ["3", "1", "2"]


def test_a_killed_process_costs_nothing_but_time(tmp_path):
    script = """
def work(ticket):
    if ticket in (1, 2) and first_time(ticket):
        os.kill(os.getpid(), signal.SIGKILL)
    return 7, False
print(json.dumps(outcome(work, range(6), 2)))
"""
    assert run(script, tmp_path) == [[ticket, 7, False] for ticket in range(6)]


def test_a_ticket_that_kills_every_process_is_left_undone(tmp_path):
    script = """
def work(ticket):
    if ticket == 1:
        os._exit(3)
    return 7, False
print(json.dumps(outcome(work, range(4), 1)))
"""
    assert run(script, tmp_path) == [[0, 7, False]]
    assert run(script.replace("range(4), 1", "range(4), 2"), tmp_path) == [
        [0, 7, False],
        [2, 7, False],
        [3, 7, False],
    ]


def test_an_error_is_no_end(tmp_path):
    script = """
def work(ticket):
    if ticket == 1:
        raise ValueError("cannot be compiled")
    return 7, False
print(json.dumps(outcome(work, range(3), 1)))
"""
    assert run(script, tmp_path) == [[0, 7, False], [1, -1, False], [2, 7, False]]


def test_processes_end_with_who_wants_them(tmp_path):
    script = """
def work(ticket):
    (folder / str(os.getpid())).touch()
    time.sleep(300)

def gone(worker):
    try:
        os.kill(int(worker), 0)
        return False
    except ProcessLookupError:
        return True

found = outcome(work, range(2), 2, lambda: len(list(folder.iterdir())) < 2)
print(json.dumps([found, [gone(path.name) for path in folder.iterdir()]]))
"""
    assert run(script, tmp_path) == [[], [True, True]]
