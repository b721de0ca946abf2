"""Rules of the house that a linter does not know."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from ray_jobs.tokenize.worker import to_table
from scone_core.corpus.documents import Pack
from scone_core.corpus.token_files import documents_to_batch
from scone_core.fgrams.fgram_shards import fgram_schema
from scone_core.fgrams.ngrams import NGrams
from tests import BUNDLED, ROOT


def sources() -> list[Path]:
    return [
        p
        for folder in ("scone_core", "ray_jobs", "pipelines")
        for p in ROOT.glob(f"{folder}/**/*.py")
    ]


def functions() -> list[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    return [
        (path, node)
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_no_function_is_longer_than_50_lines() -> None:
    sizes = {
        f"{path}: {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path, node in functions()
    }
    assert not {name: size for name, size in sizes.items() if size > 50}


def test_every_function_says_what_it_returns() -> None:
    assert not [f"{path}: {node.name}" for path, node in functions() if node.returns is None]


def test_no_file_is_longer_than_400_lines() -> None:
    sizes = {path: len(path.read_text().splitlines()) for path in sources()}
    assert not {path: size for path, size in sizes.items() if size > 400}


def test_no_folder_has_more_than_20_modules() -> None:
    modules = [path for path in sources() if path.name != "__init__.py"]
    folders = {path.parent for path in modules}
    sizes = {folder: sum(path.parent == folder for path in modules) for folder in folders}
    assert not {folder: size for folder, size in sizes.items() if size > 20}


def test_every_package_has_an_init_that_imports_nothing() -> None:
    """Workers stay light: to import a module imports the packages above it. vLLM's entry point is
    in one, because vLLM names it by its package.
    """
    folders = {path.parent for path in sources()} - {BUNDLED}
    inits = {folder / "__init__.py" for folder in folders}
    assert not [path for path in inits if not path.exists()]
    importing = {
        path
        for path in inits
        if any(
            isinstance(node, ast.Import | ast.ImportFrom)
            for node in ast.parse(path.read_text()).body
        )
    }
    assert importing <= {ROOT / "ray_jobs" / "serve" / "vllm_plugin" / "__init__.py"}


def test_no_script_shadows_the_standard_library() -> None:
    """`python pipelines/x.py` puts that folder first on the path."""
    names = {path.stem for path in (ROOT / "pipelines").glob("*.py")}
    assert not names & set(sys.stdlib_module_names)


def test_no_module_has_a_name_that_says_nothing() -> None:
    nothing = {"utils", "util", "helpers", "common", "misc", "manager"}
    assert not nothing & {path.stem for path in sources()}


@pytest.mark.parametrize(
    "name", ["can_restore", "resume_from_checkpoint", ".restore(", "as_directory"]
)
def test_ray_train_apis_that_raise_are_not_used(name: str) -> None:
    """Ray Train V2 removed them (michelangelo-ai/michelangelo#1571); `as_directory` needs barriers
    inside (ray-project/ray#57118).
    """
    assert not [path for path in sources() if name in path.read_text()]


def test_counting_imports_no_torch() -> None:
    modules = "scone_core.fgrams.fgram_shards, scone_core.counting.one_scan"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "False\n"


def test_no_schema_has_32_bit_offsets() -> None:
    """Such a column overflows at 2 GiB, also in a shuffle or a batch of texts
    (ray-project/ray#29492, #65200, #47448, apache/arrow#25822).
    """
    tokens = documents_to_batch([], [], vocab_size=10).schema
    texts = to_table(0, Pack(doc_ids=[1], texts=["text"])).drop_columns("num_skipped").schema
    rows = NGrams(np.zeros((1, 5), np.uint32), np.ones(1, np.uint8), np.ones(1, np.uint64))
    for schema in (tokens, texts, rows.to_batch().schema, fgram_schema(5)):
        for field in schema:
            narrow = (pa.types.is_string, pa.types.is_binary, pa.types.is_list)
            assert not any(is_narrow(field.type) for is_narrow in narrow), field


def test_a_submitted_job_uploads_less_than_5_mb() -> None:
    """What `ray job submit --working-dir .` sends is the checkout less `.rayignore`."""
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    ignored = [line.rstrip("/") for line in (ROOT / ".rayignore").read_text().splitlines()]
    sent = [
        name
        for name in tracked.stdout.split()
        if not name.startswith(tuple(f"{i}/" for i in ignored))
    ]
    assert sum((ROOT / name).stat().st_size for name in sent if (ROOT / name).exists()) < 5 << 20


def test_nothing_names_a_path_of_one_machine() -> None:
    pattern = re.compile(r"(?<![\w.])/(home|root|work|Users)/\w")
    assert not [path for path in sources() if pattern.search(path.read_text())]
