"""The law of the allocator: an array that takes the place of a freed one costs no page faults."""

import platform
import subprocess
import sys

import pytest

FAULTS_OF_THE_SECOND_ARRAY = """
import resource
import numpy as np
from scone_core.machine.allocator import keep_freed_memory

keep_freed_memory()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.empty(64 << 20, np.uint8).fill(1)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are left alone")
def test_freed_memory_is_used_again():
    script = [sys.executable, "-c", FAULTS_OF_THE_SECOND_ARRAY]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100, "fresh pages cost 544 at least (huge pages), else 16,384"
