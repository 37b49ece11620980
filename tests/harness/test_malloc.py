"""Promise: a rank on CPUs keeps memory that a step frees, unless the user configured malloc."""

import ctypes
import subprocess
import sys

import pytest

from harness.training.malloc import keep_freed_memory

STEPS = """
import ctypes, resource, sys
from harness.training.malloc import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
if sys.argv[1] == "kept":
    assert keep_freed_memory()

def faults_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    activations = [libc.malloc(8 << 20) for _ in range(16)]
    for activation in activations:
        ctypes.memset(activation, 1, 8 << 20)
    for activation in activations:
        libc.free(activation)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for _ in range(3):
    faults_of_a_step()
print(faults_of_a_step())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt")
def test_a_step_takes_no_page_faults_for_memory_that_the_last_one_freed():
    faults = {
        mode: int(subprocess.check_output([sys.executable, "-c", STEPS, mode], text=True))
        for mode in ("kept", "as the library does")
    }
    assert faults["kept"] < 100
    assert faults["as the library does"] > 10_000  # 128 MB are 32,768 pages, or the tuning would be useless


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "1000"),
        ("MALLOC_MMAP_THRESHOLD_", "1000"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1000"),
        ("LD_PRELOAD", "/usr/lib/libjemalloc.so.2"),
    ],
)
def test_settings_of_the_user_are_not_changed(name, value):
    assert not keep_freed_memory({name: value})
