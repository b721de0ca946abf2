"""Laws of the choice of NumPy's sort."""

import os
import subprocess
import sys

import pytest

from scone_core.machine.sorting import VARIABLE, WITHOUT_AVX512, has_amd_avx512, sort_seconds

ZEN_4 = """processor\t: 0
vendor_id\t: AuthenticAMD
flags\t\t: fpu avx2 avx512f avx512bw

processor\t: 1
"""


@pytest.mark.parametrize(
    ("cpuinfo", "asked"),
    [
        (ZEN_4, True),
        (ZEN_4.replace("AuthenticAMD", "GenuineIntel"), False),
        (ZEN_4.replace("avx512f avx512bw", ""), False),
        ("CPU implementer\t: 0x41\n", False),
    ],
)
def test_only_amd_cpus_with_avx512_are_asked(cpuinfo: str, asked: bool) -> None:
    assert has_amd_avx512(cpuinfo) == asked


def test_the_variable_turns_avx512_off_in_this_numpy() -> None:
    code = "import numpy as np; print(np.lib.introspect.opt_func_info())"
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | WITHOUT_AVX512,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "'current': 'AVX2" in found.stdout or "'current': 'baseline" in found.stdout
    assert "'current': 'AVX512" not in found.stdout


def test_what_is_measured_is_a_process_with_the_variables() -> None:
    assert 0 < sort_seconds({}) < 60
    assert 0 < sort_seconds({VARIABLE: ""}) < 60
