"""The inputs of the host extension's build for the installed versions of torch, Python and CUDA."""

import hashlib
import platform
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import torch

SOURCE_FOLDER = Path(__file__).with_name("extension")
"""The folder of the sources, one translation unit: `extension.cpp` and the headers that are its parts."""

MODULE = "fusednorm_host"


def compute_build_key() -> str:
    """Compute the key of a build: a hash of the sources and of the versions against which it is compiled."""
    sources = (f"{path.name}\n{path.read_text()}" for path in sorted(SOURCE_FOLDER.iterdir()) if path.is_file())
    # SOABI distinguishes versions of Python, builds with and without its lock, and C libraries.
    facts = (torch.__version__, torch.version.git_version, sysconfig.get_config_var("SOABI"), platform.machine())
    return hashlib.sha256("\n".join((*sources, *map(str, facts))).encode()).hexdigest()


def make_compiler_command() -> list[str]:
    """Make the compiler's command line, without the output file.

    Raises:
        FileNotFoundError: torch's or Triton's headers are missing.
    """
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("Triton is not installed: its headers of the CUDA driver are needed")
    torch_root = Path(torch.__file__).parent
    includes = [
        torch_root / "include",
        torch_root / "include" / "torch" / "csrc" / "api" / "include",
        Path(spec.origin).parent / "backends" / "nvidia" / "include",
        Path(sysconfig.get_paths()["include"]),
    ]
    libraries = ["torch_python", "torch", "torch_cpu", "c10"]
    options = []
    if torch.version.cuda:
        includes += _find_cuda_includes(torch_root.parent)
        libraries += ["torch_cuda", "c10_cuda"]
        options.append("-DWITH_CUDA")
    return [
        "g++", "-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", *options,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{path}" for path in includes), str(SOURCE_FOLDER / "extension.cpp"),
        f"-L{torch_root / 'lib'}", *(f"-l{name}" for name in libraries),
    ]  # fmt: skip


def _find_cuda_includes(packages: Path) -> list[Path]:
    """Find the folders that have the CUDA runtime's headers: those of wheels next to torch, or of a toolkit."""
    candidates = [*packages.glob("nvidia/*/include"), Path("/usr/local/cuda/include")]
    return [path for path in candidates if (path / "cuda_runtime_api.h").exists()]
