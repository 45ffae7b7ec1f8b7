"""The load-test harness against a real server: every answer is right."""

import subprocess
import sys


def test_every_answer_of_a_run_is_right(server):
    command = [sys.executable, "-m", "normload", "run", "--url", server.url, "--verify"]
    options = ["--requests", "150", "--connections", "4", "--pool", "150", "--max-mib", "0.25"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    every = next(line.split() for line in done.stdout.splitlines() if line.split()[:1] == ["all"])
    assert every[1] == "150"
    assert every[2] == "0"
    assert every[-2:] == ["150", "0"]
