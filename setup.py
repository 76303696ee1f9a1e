"""The native library of the CPU backend: the same C++ sources, built once for each instruction set.

Everything else about the package stands in pyproject.toml. A build that fails, for want of a compiler, with an old
one (AVX-512 BF16 needs GCC 10) or on another processor, is left out with a warning: the package works without.
"""

from copy import copy
from glob import glob
from os import environ
from os.path import join

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"]
ISAS = {
    "avx512_bf16": [*AVX512, "-mavx512vnni", "-mavx512bf16"],
    "avx512_vnni": [*AVX512, "-mavx512vnni"],
    "avx512": AVX512,
    "avx2": ["-mavx2", "-mfma"],
    "portable": [],
}
"""Compiler flags of each build that `motet.kernels.cpu.library` knows."""

CHOSEN = environ.get("MOTET_BUILDS", " ".join(ISAS)).split()
"""What is built: all, unless the caller names some."""

FLAGS = ["-std=c++17", "-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"]


class ParallelBuilds(build_ext):
    """Two builds at a time, the objects of each in a folder of their own: they are named by their source alone."""

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or 2

    def build_extension(self, ext):
        own = copy(self)
        own.build_temp = join(self.build_temp, ext.name)
        super(ParallelBuilds, own).build_extension(ext)


setup(
    cmdclass={"build_ext": ParallelBuilds},
    ext_modules=[
        Extension(
            f"motet.kernels.cpu._{isa}",
            sources=sorted(glob("src/kernels/cpu/*.cpp")),
            depends=glob("src/kernels/cpu/*.h"),
            # The caller's own flags come last, so that they win (see `make sanitize`).
            extra_compile_args=[*FLAGS, *flags, *environ.get("CXXFLAGS", "").split()],
            extra_link_args=["-pthread"],
            language="c++",
            py_limited_api=True,
            optional=True,
        )
        for isa, flags in ISAS.items()
        if isa in CHOSEN
    ],
)
