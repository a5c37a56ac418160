"""Build the compiled kernels as plain C libraries, so that one wheel fits every Python of a platform.

The kernels use nothing of Python: ctypes loads them. So a wheel's tag is ``py3-none-PLATFORM``, and ``py3-none-any`` if
``SLIPWAY_KERNELS=none`` leaves the kernels out or there was no C compiler; numpy does their work then, more slowly.
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

COMMON = Path("shared/slipway/machine/compiled")
HEADERS = ("processors.h", "vectors.h")
SUFFIX = ".pyd" if sys.platform == "win32" else ".so"
NAME = "_kernel"


def kernel(folder: str, header: str, *flags: str) -> Extension:
    """Return the kernel of a folder; its headers become part of the source distribution."""
    own = Path(folder)
    return Extension(
        ".".join([*own.parts[2:], NAME]),  # below services/NAME
        [str(own / "kernel.c")],
        include_dirs=[str(COMMON), str(own)],
        depends=[str(own / header), *(str(COMMON / name) for name in HEADERS)],
        extra_compile_args=["-O3", *flags, "-Wno-psabi"],
        optional=True,
    )


class BuildKernels(build_ext):
    """Name a kernel without Python's version, as no version matters to it."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the path of a kernel below the folder that is built into."""
        return str(Path(*fullname.split("."))) + SUFFIX


class Wheel(bdist_wheel):
    """Name a wheel by the platform of its kernels, or by none if it has none."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, its binary interface and the platform."""
        *_, platform = super().get_tag()
        found = list(Path(self.bdist_dir).rglob(NAME + SUFFIX))
        if found and len(found) != len(KERNELS):
            raise SystemExit(
                f"of {len(KERNELS)} kernels {len(found)} were compiled: see above, or set SLIPWAY_KERNELS=none"
            )
        return "py3", "none", platform if found else "any"


KERNELS = [
    kernel("services/merge/slipway_merge/tensors", "kernel_rows.h", "-ffp-contract=fast"),
    kernel("services/quantize/slipway_quantize/grid", "kernel_groups.h", "-ffp-contract=off"),
]

setup(
    ext_modules=[] if os.environ.get("SLIPWAY_KERNELS") == "none" else KERNELS,
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": Wheel},
)
