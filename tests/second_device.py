"""A second device for machines that have only one: a backend of torch in the computer's own memory.

Its tensors are plain `torch.Tensor`s on device "second". Functions reach them through torch's dispatcher, and backward
passes run in the device's own thread, as on CUDA, so whatever code does for a tensor of CUDA it does for them. A
function of tensors on two devices is refused, as CUDA refuses it. What this cannot show are CUDA's own kernels, streams
and NCCL.

The backend is compiled on first use (second_device.cpp), which takes about ten seconds. A process can have one such
device and never lose it: use it in a process of its own (`tests.distributed.jobs`).
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

NAME, PLACE = "second", "second:0"
SOURCE = Path(__file__).with_suffix(".cpp")
NEW = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)  # whose headers second_device.cpp is written for
POSSIBLE = NEW and shutil.which("g++") is not None
REASON = f"the second device needs torch 2.13 (this is {torch.__version__}) and the compiler g++"


class _Module:
    """What torch asks of a device besides its functions."""

    @staticmethod
    def is_available() -> bool:
        return True

    is_initialized = is_available

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def set_device(device: object) -> None:
        pass

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        pass

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


def add() -> None:
    """Give this process the second device."""
    if hasattr(torch, NAME):
        return
    torch.utils.rename_privateuse1_backend(NAME)
    torch.ops.load_library(str(compiled()))
    torch._register_device_module(NAME, _Module)


def compiled() -> Path:
    """The library for this version of torch, compiled unless an earlier process has done so."""
    made_of = SOURCE.read_bytes() + torch.__version__.encode() + str(os.getuid()).encode()
    library = Path(tempfile.gettempdir()) / f"dpformer_second_device_{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    if not library.exists():
        home = Path(torch.__file__).parent
        folders = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}", f"-L{home / 'lib'}"]
        own = library.with_suffix(f".{os.getpid()}")
        options = [
            "-std=c++20",
            "-O1",
            "-fPIC",
            "-shared",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        ]
        subprocess.run(["g++", *options, SOURCE, *folders, "-lc10", "-ltorch_cpu", "-o", own], check=True)
        own.replace(library)  # several processes may compile it at once
    return library
