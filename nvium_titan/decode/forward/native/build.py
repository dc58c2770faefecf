"""Compiling and loading `kernels.c`: once per machine, then from a cache.

The C file needs no headers but the compiler's own, so that any C compiler builds it in a second or
two. The library is kept under $XDG_CACHE_HOME/nvium_titan (~/.cache/nvium_titan), named after the
source, the compiler and the processor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from nvium_titan.errors import DependencyError

_SOURCE = Path(__file__).with_name("kernels.c")
# Nothing that reorders sums; the two -fno only give up errno and floating-point traps.
_OPTIONS = ("-O3", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
# The last attempts are for compilers that do not know the flags; they cost speed, not exactness.
_ATTEMPTS = (("-march=native", "-fopenmp"), ("-fopenmp",), ("-march=native",), ())


@functools.cache
def load_library() -> ctypes.CDLL:
    """Return the compiled kernels.

    Raises:
        DependencyError: If there is no C compiler ($CC, cc, gcc or clang), or it fails.
    """
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    compiler = next((found for name in names if (found := shutil.which(name))), None)
    if compiler is None:
        raise DependencyError(
            f"no C compiler ({', '.join(names)}) for the native kernels; install one "
            "(apt install gcc), name one in $CC, or decode with kernels='torch'"
        )
    parts = (compiler, _version(compiler), _processor(), torch.__version__, *_OPTIONS)
    identity = "\n".join(parts)
    digest = hashlib.sha256(_SOURCE.read_bytes() + identity.encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nvium_titan"
    library = folder / f"kernels-{digest}.so"
    if not library.is_file():
        library = _compile(compiler, library)
    return ctypes.CDLL(str(library))


def _compile(compiler: str, library: Path) -> Path:
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(dir=library.parent)
    except OSError:  # a read-only home: compile for this process alone
        folder = tempfile.mkdtemp(prefix="nvium-")
        library = Path(folder) / library.name
    built = Path(folder) / "kernels.so"
    error = ""
    for flags in _ATTEMPTS:
        # torch's own OpenMP runtime, so that the two share one pool of threads.
        runtime = [str(path) for path in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*")]
        done = subprocess.run(
            [compiler, *_OPTIONS, *flags, "-o", str(built), str(_SOURCE)]
            + (runtime if "-fopenmp" in flags else [])
            + ["-lm"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            # Another process may have been faster; the two files are the same.
            os.replace(built, library)
            if library.parent != Path(folder):
                os.rmdir(folder)
            return library
        error = error or done.stderr.strip()
    shutil.rmtree(folder)
    raise DependencyError(
        f"{compiler} cannot build the native kernels; name another compiler in $CC, or decode with "
        f"kernels='torch'. It said:\n{error}"
    )


def _version(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return done.stdout


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features"))}))
