"""Compile the `.proto` files of this folder to `services.binpb`: `python -m normserve.grpc.protos`."""

import sys
from pathlib import Path

from grpc_tools import __file__ as tools
from grpc_tools import protoc

FOLDER = Path(__file__).parent


def compile_descriptors(target: Path) -> int:
    """Compile the files and what they import to one descriptor set; return protoc's exit code."""
    sources = sorted(each.name for each in FOLDER.glob("*.proto"))
    imported = Path(tools).parent / "_proto"
    options = [f"-I{FOLDER}", f"-I{imported}", "--include_imports", f"--descriptor_set_out={target}"]
    code: int = protoc.main(["protoc", *options, *sources])
    return code


if __name__ == "__main__":
    sys.exit(compile_descriptors(FOLDER / "services.binpb"))
