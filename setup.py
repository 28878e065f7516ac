"""Build of the compiled module `deep_offload._C`; everything else about the package stands in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import find_namespace_packages, setup

SOURCES = sorted(str(path) for path in Path("csrc").rglob("*.cpp"))
HEADERS = sorted(str(path) for path in Path("csrc").rglob("*.h"))

# Contraction off and no -march: the bits must not depend on the compiler's taste or on the machine that builds.
# Instruction sets beyond the baseline are target regions inside csrc/isa, chosen at run time.
COMPILE_ARGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-Wall", "-Wextra"]

ParallelCompile("DEEP_OFFLOAD_BUILD_JOBS", default=2).install()

setup(
    packages=find_namespace_packages(
        include=["megatron.training", "megatron.training.*", "deep_offload", "deep_offload.*"]
    ),
    package_data={"deep_offload": ["py.typed", "*.pyi"]},
    ext_modules=[
        Pybind11Extension(
            "deep_offload._C",
            SOURCES,
            include_dirs=["csrc"],
            depends=HEADERS,
            cxx_std=17,
            extra_compile_args=COMPILE_ARGS,
            extra_link_args=["-fopenmp"],
        )
    ],
)
