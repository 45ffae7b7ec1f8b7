"""Podman, as tests drive it."""

import subprocess
from collections.abc import Sequence
from datetime import datetime

# No systemd keeps a schedule of health checks where tests run; they ask for each themselves.
CAREFUL = (
    *("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
    *("--memory", "4g", "--health-interval", "disable"),
)


def podman(*arguments: str) -> str:
    """What it prints to stdout."""
    done = subprocess.run(["podman", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"podman {' '.join(arguments)}: {done.stderr}"
    return done.stdout.strip()


class Container:
    """A container of an image, started."""

    def __init__(self, image: str, *flags: str, command: Sequence[str] = ()) -> None:
        self.id = podman("create", *CAREFUL, *flags, "--publish", "127.0.0.1::8000", image, *command)
        podman("start", self.id)

    @property
    def url(self) -> str:
        """Where its server is reached from here."""
        return f"http://{podman('port', self.id, '8000/tcp')}"

    @property
    def log(self) -> str:
        """Everything it has written, stdout and stderr together."""
        return self._logs()

    def _logs(self, *flags: str) -> str:
        command = ["podman", "logs", *flags, self.id]
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
        ).stdout

    def said(self, text: str) -> float:
        """When it first wrote a line that has this text, by `time.time`."""
        line = next(each for each in self._logs("--timestamps").splitlines() if text in each)
        return datetime.fromisoformat(line.split()[0]).timestamp()

    def is_healthy(self) -> bool:
        """What the image's own check says."""
        assert self.state("Running") == "true", self.log
        done = subprocess.run(["podman", "healthcheck", "run", self.id], capture_output=True, check=False)
        return done.returncode == 0

    def state(self, name: str) -> str:
        """Of its state, one thing."""
        return podman("inspect", "--format", f"{{{{.State.{name}}}}}", self.id)

    def run(self, *command: str) -> str:
        """What a command inside prints."""
        return podman("exec", self.id, *command)

    def stop(self) -> int:
        """Ask it to end, as `docker stop` does, with more patience than a drain takes; its exit code."""
        podman("stop", "--time", "40", self.id)
        return int(self.state("ExitCode"))

    def remove(self) -> None:
        podman("rm", "--force", "--volumes", "--time", "0", self.id)
