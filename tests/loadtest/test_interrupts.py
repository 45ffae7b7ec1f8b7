import signal
import subprocess
import sys

from normload.interrupts import block_interrupts_of_children


def test_a_process_that_is_started_in_the_block_is_never_interrupted():
    program = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('goes on')"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with block_interrupts_of_children():
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("goes on\n", "")
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
