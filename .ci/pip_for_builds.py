"""Lets pip reach in the build of an image what it reaches here: writes FOLDER/pip.conf, prints the build's flags.

Package indexes, certificates and folders of wheels are this machine's affair and belong in no image; so they are
mounted while it is built, and never copied.

Usage: pip_for_builds.py FOLDER
"""

import ast
import subprocess
import sys
from pathlib import Path

_CERTIFICATES = Path("/etc/ssl/certs")


def main(folder: str) -> None:
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # What the environment says comes first in the list, and overrides the files.
    settings: dict[str, str] = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        settings.setdefault(name.rpartition(".")[2], ast.literal_eval(value))

    configuration = Path(folder).resolve() / "pip.conf"
    lines = [f"{name} = {' '.join(value.split())}\n" for name, value in settings.items()]
    configuration.write_text("".join(["[global]\n", *lines]), encoding="utf-8")

    mounted = {configuration: "/etc/pip.conf", _CERTIFICATES: _CERTIFICATES}
    for word in " ".join(settings.values()).split():
        # An index links to files beside itself.
        path = Path(word.removeprefix("file://")).parent if word.startswith("file://") else Path(word)
        if path.is_absolute() and path.exists() and not path.is_relative_to(_CERTIFICATES):
            mounted[path] = path
    print(*(f"--volume {here}:{there}:ro" for here, there in mounted.items() if Path(here).exists()))


if __name__ == "__main__":
    main(*sys.argv[1:])
