"""Writes the bill of materials of the image that it runs in, as CycloneDX JSON, to stdout.

Python's packages are what cyclonedx-py finds in the server's environment, Debian's those that dpkg has installed.

Usage: sbom.py TARGET
"""

import json
import platform
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

_ENVIRONMENT = "/opt/normserve"
_QUERY = "${db:Status-Abbrev}\t${Package}\t${Version}\t${Architecture}\n"


def main(target: str) -> None:
    tool = Path(sys.executable).with_name("cyclonedx-py")
    bom = json.loads(_output(str(tool), "environment", "--output-reproducible", f"{_ENVIRONMENT}/bin/python"))
    (server,) = [each for each in bom["components"] if each["name"] == "normserve"]
    bom["metadata"]["component"] = {
        "type": "container",
        "bom-ref": f"normserve:{target}",
        "name": f"normserve:{target}",
        "version": server["version"],
    }
    bom["components"] += [
        *_of_debian(),
        {"type": "platform", "name": "python", "version": platform.python_version()},
    ]
    json.dump(bom, sys.stdout, indent=2)


def _of_debian() -> list[dict[str, str]]:
    system = platform.freedesktop_os_release()
    distribution, release = system["ID"], system["VERSION_ID"]
    components = [{"type": "operating-system", "name": distribution, "version": release}]
    for line in _output("dpkg-query", "--show", "--showformat", _QUERY).splitlines():
        status, name, version, architecture = line.split("\t")
        if status.startswith("ii"):
            qualifiers = f"arch={architecture}&distro={distribution}-{release}"
            purl = f"pkg:deb/{distribution}/{quote(name)}@{quote(version)}?{qualifiers}"
            components.append({"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl})
    return components


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
