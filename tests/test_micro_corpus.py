"""What libFuzzer found worth keeping, mutated models for the most part: each is refused or runs to an end."""

import ctypes
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from multipod.micro import Arena
from multipod.micro import interpreter as home

CORPUS = Path(__file__).parents[1] / "c" / "fuzz" / "corpus.tar.xz"
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def test_the_kept_corpus():
    """Through the C functions themselves: the error texts of a thousand files would take longer than the files."""
    runtime = home.library.load()
    kernels = ctypes.byref(ctypes.c_void_p.in_dll(runtime, "mpm_all_kernels"))
    count = ctypes.c_uint32.in_dll(runtime, "mpm_all_kernels_count").value
    state = ctypes.create_string_buffer(runtime.mpm_host_interpreter_bytes())
    refused = ran = 0
    with tarfile.open(CORPUS) as files:
        for member in files:
            content = files.extractfile(member)
            if content is None:
                continue
            model = content.read()
            file, arena = home._aligned(len(model)), Arena(1 << 16)
            file[:] = np.frombuffer(model, np.uint8)
            where = ctypes.c_void_p(file.ctypes.data)
            if runtime.mpm_init(state, where, len(model), ctypes.byref(arena.state), kernels, count):
                refused += 1
                continue
            runtime.mpm_run(state)
            runtime.mpm_reset(state)
            ran += 1
    assert refused > 300
    assert ran > 300
