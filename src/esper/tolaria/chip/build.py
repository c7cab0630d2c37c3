"""Compiled programs: device source made into something that can be launched, kept by its hash.

On a GPU NVRTC makes it, which comes with torch. On a CPU the system's C++ compiler makes a library
of it for that very processor, in which a block of threads is a loop over vectors of samples.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from esper.leyline import EsperError
from esper.tolaria.chip.source import BLOCKS, SHARED_BYTES, THREADS, whole_text

REALS = {torch.float32: "float", torch.float64: "double"}
COMPILERS = ("c++", "g++", "clang++")
FEW_THREADS = 64  # of a block whose threads have nothing to do with each other
FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
         "-shared", "-fPIC", "-w")  # fmt: skip
CACHE_BYTES = 1024 * 1024  # of a processor's second cache, about
Launch = Callable[[str, Tensor, int, int], None]  # entry, arguments, rows, bytes of a block


def find_compiler() -> str | None:
    """The path of the first C++ compiler there is."""
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def _kept(ending: str, make: Callable[[Path], object], *parts: str) -> Path:
    """The file that is made of these, once; it moves to its place at once, so that no other process
    finds half of it."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "esper" / "chip"
    name = hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()
    target = home / f"{name}.{ending}"
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if home.stat().st_uid != os.getuid() or home.stat().st_mode & 0o022:
        raise EsperError(
            "What is compiled is kept, and run, only where nobody else can write",
            given=home,
            fix="make this folder yours with 'chmod go-w', or set XDG_CACHE_HOME to another",
        )
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=home) as folder:
            make(draft := Path(folder) / target.name)
            draft.replace(target)
    return target


def _definitions(dtype: torch.dtype) -> list[str]:
    return [f"-DREAL={REALS[dtype]}", f"-DTHREADS={THREADS}", f"-DBLOCKS={BLOCKS}", "-std=c++17"]


def launcher(text: str, dtype: torch.dtype, device: torch.device) -> Launch:
    """The program for a device."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        return _device_launcher(text, dtype, capability, shared_bytes(device))
    library = build_library(text, dtype)
    return lambda entry, table, *_: getattr(library, entry)(ctypes.c_void_p(table.data_ptr()))


def shared_bytes(device: torch.device) -> int:
    """That one block may have there; in C++ what is quick to reach."""
    if device.type != "cuda":
        return CACHE_BYTES
    found = torch.cuda.get_device_properties(device)
    return int(getattr(found, "shared_memory_per_block_optin", SHARED_BYTES))


@lru_cache(maxsize=32)
def _device_launcher(
    text: str, dtype: torch.dtype, capability: tuple[int, int], most: int
) -> Launch:
    from torch.cuda._utils import _cuda_load_module

    flags = [f"-arch=sm_{capability[0]}{capability[1]}", *_definitions(dtype)]
    text = whole_text(text)

    def make(draft: Path) -> None:
        try:  # on all processors at once
            code = _compile_for_device(text, [*flags, "--split-compile=0"])
        except EsperError:  # an NVRTC that does not know how
            code = _compile_for_device(text, flags)
        draft.write_bytes(code)

    target = _kept("cubin", make, text, *flags, str(torch.version.cuda))
    kernels = _cuda_load_module(target.read_bytes(), ["describe_rows", "compute_rows"])
    assert isinstance(kernels, dict)
    kernels["compute_rows"].set_shared_memory_config(most)

    def launch(entry: str, arguments: Tensor, rows: int, room: int) -> None:
        describes = entry == "describe_rows"  # by one thread a row, not one block
        grid, block = (-(-rows // FEW_THREADS), FEW_THREADS) if describes else (rows, THREADS)
        kernel = kernels[entry]
        kernel(grid=(grid, 1, 1), block=(block, 1, 1), args=[arguments], shared_mem=room)

    return launch


def _compile_for_device(text: str, flags: list[str]) -> bytes:
    """The machine code that NVRTC makes of it."""
    from torch.cuda._utils import _get_gpu_rtc_library

    nvrtc, program, size = _get_gpu_rtc_library(), ctypes.c_void_p(), ctypes.c_size_t()
    options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))

    def take(kind: str) -> bytes:
        getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{kind}")(program, buffer)
        return buffer.raw

    made = ctypes.byref(program)
    failed = nvrtc.nvrtcCreateProgram(made, text.encode(), b"chip.cu", 0, None, None)
    failed = failed or nvrtc.nvrtcCompileProgram(program, len(flags), options)
    try:
        if failed:
            raise _not_compiled("NVRTC " + " ".join(flags), take("ProgramLog").decode())
        return take("CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _not_compiled(command: str, said: str) -> EsperError:
    return EsperError(
        "The chip backend's source was not compiled",
        given=command,
        fix=f"see what the compiler said: {said[:600]}",
    )


@lru_cache(maxsize=1)
def own_processor(compiler: str) -> tuple[list[str], str]:
    """What makes a compiler write for this very processor, if it knows how, and which that is: a
    library for another one may be found where homes are shared."""
    flags = ["-march=native"]
    command = [compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull]
    run = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    return ([], platform.machine()) if run.returncode else (flags, run.stdout)


@lru_cache(maxsize=32)
def build_library(text: str, dtype: torch.dtype) -> ctypes.CDLL:
    """The program for the CPU, compiled unless it has been before."""
    compiler = find_compiler()
    if compiler is None:
        raise EsperError(
            "There is no C++ compiler to build the chip backend for the CPU with",
            given="none of " + ", ".join(COMPILERS),
            fix='install one, or choose backend="fused"',
        )
    own, processor = own_processor(compiler)
    command = [compiler, *_definitions(dtype), *own, *FLAGS]
    text = whole_text(text)

    def make(draft: Path) -> None:
        source = draft.with_suffix(".cpp")
        source.write_text(text)
        whole = [*command, str(source), "-o", str(draft)]
        run = subprocess.run(whole, capture_output=True, text=True, check=False)  # noqa: S603
        if run.returncode:
            raise _not_compiled(" ".join(whole), run.stderr)

    return ctypes.CDLL(str(_kept("so", make, text, *command, sys.platform, processor)))
