"""this CPU -> the environment variables with which NumPy sorts words fastest on it.

NumPy chooses its sort by CPU feature when it is imported. Its AVX-512 sort compresses registers
straight to memory, which Zen 4 does in microcode: 12 M random words took 800 ms there (15 M
words/s), and 150 ms (80 M words/s) with AVX2; in 100 pieces 26 and 106 M words/s. On Intel CPUs
AVX-512 is 2 to 3 times as fast as AVX2. So AMD CPUs alone are asked, by measuring both.
"""

import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

VARIABLE = "NPY_DISABLE_CPU_FEATURES"
AVX512_FEATURES = "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL"
"""NumPy's names for what it dispatches on, as far as AMD has it."""
WITHOUT_AVX512 = {VARIABLE: AVX512_FEATURES}
CLEARLY = 1.3
"""How many times as fast a sort must be to be chosen: less may be noise."""

_PROBE = """
import time
import numpy as np
words = np.random.default_rng(0).integers(0, 1 << 63, 1 << 19, np.uint64)
seconds = []
for _ in range(5):
    pieces = np.split(words.copy(), 64)
    started = time.perf_counter()
    for piece in pieces:
        piece.sort()
    seconds.append(time.perf_counter() - started)
print(min(seconds))
"""


@lru_cache(maxsize=1)
def sorting_environment() -> dict[str, str]:
    """The variables that processes which sort need before they import NumPy; none on most CPUs.

    A variable that the user has set is left alone.
    """
    if VARIABLE in os.environ or not has_amd_avx512(Path("/proc/cpuinfo").read_text()):
        return {}
    is_faster = sort_seconds({}) > CLEARLY * sort_seconds(WITHOUT_AVX512)
    return WITHOUT_AVX512 if is_faster else {}


def has_amd_avx512(cpuinfo: str) -> bool:
    """Whether the first CPU of a /proc/cpuinfo is AMD's and has AVX-512."""
    lines = [line.partition(":") for line in cpuinfo.partition("\n\n")[0].splitlines()]
    fields = {name.strip(): value.split() for name, _, value in lines}
    return fields.get("vendor_id") == ["AuthenticAMD"] and "avx512f" in fields.get("flags", [])


def sort_seconds(environment: dict[str, str]) -> float:
    """What a process with these variables takes to sort 2^19 words in 64 pieces, the best of 5."""
    command = [sys.executable, "-c", _PROBE]
    result = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return float(result.stdout)
