"""Laws of a script's options: a file gives them, the command line overrides it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines.recipes import RecipeChoice
from ray_jobs.count.config import CountConfig
from ray_jobs.count.fgram_grow import GrowConfig
from ray_jobs.evaluate.config import EvaluateConfig
from ray_jobs.precompute.config import ConvertConfig, PrecomputeConfig, VerifyConfig
from ray_jobs.runtime.options import read_command, read_options
from ray_jobs.serve.export import ExportConfig
from ray_jobs.serve.measure_decode import DecodeConfig
from ray_jobs.tokenize.config import TokenizeConfig
from ray_jobs.train.config import TrainConfig
from scone_core.artifacts.config import Frozen, StageConfig
from scone_core.artifacts.folders import shared_fields
from scone_core.artifacts.manifests import FGramsManifest, load_manifest
from scone_core.corpus.documents import DocumentFormat
from scone_core.fgrams.inspection import Top
from scone_core.model.decoders import DecoderConfig
from scone_core.training.optimizer import OptimizerConfig
from tests import ROOT
from tests.builders.corpora import write_fgrams

SCRIPTS = sorted(
    path.name
    for path in (ROOT / "pipelines").glob("*.py")
    if path.stem not in ("__init__", "recipes")
)
CONFIGS: list[Frozen] = [
    TokenizeConfig(inputs=("a", "b"), tokenizer="t", form=DocumentFormat(split="train"), out="o"),
    CountConfig(tokens="t", chunks=("x", "y"), num_fgrams=5, exclude_tokens=(1, 2), out="o"),
    GrowConfig(fgrams="f", counted="c", num_new=3, out="o"),
    TrainConfig(
        train_tokens="t",
        validation_tokens="v",
        fgrams="f",
        model=DecoderConfig(options={"rms_norm_eps": 1e-5, "rope_theta": 1e6}),
        optimizer=OptimizerConfig(learning_rate=1e-5, wsd_decay=1),
        network_interface="eth0",
        out="o",
    ),
    PrecomputeConfig(checkpoint="c", fgrams="f", row_format="int8", num_actors=2, out="o"),
    EvaluateConfig(checkpoint="c", task_files="f", tasks=("a", "b"), out="s3://bucket/o"),
    ExportConfig(checkpoint="c", tokens="t", chat_template="{{ a }}\n{% b %}", out="o"),
    DecodeConfig(model="m", baseline="b", tokens="t", engine={"seed": 1, "x": 1e-7}, out="o"),
    ConvertConfig(table="t", row_format="fp8", out="o"),
    VerifyConfig(table="t", checkpoint="c", fgrams="f", num_rows=7),
    Top(fgrams="f", num=3, form="json"),
    RecipeChoice(recipe="chat_finetuning", root="/r", model="m"),
]

TABLE_COMMANDS: dict[str, type[StageConfig]] = {"convert": ConvertConfig, "verify": VerifyConfig}


def write(path: Path, content: object) -> str:
    dump = json.dumps if path.suffix == ".json" else yaml.safe_dump
    path.write_text(dump(content))
    return str(path)


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_a_file_may_hold_a_whole_configuration(config: Frozen, suffix: str, tmp_path: Path) -> None:
    file = write(tmp_path / f"options{suffix}", config.model_dump(mode="json"))
    assert read_options(type(config), description="", args=["--config", file]) == config


def test_options_on_the_command_line_override_those_of_the_file(tmp_path: Path) -> None:
    options = {"inputs": ["a"], "tokenizer": "t", "shard_mb": 8, "form": {"block_chars": 10}}
    file = write(tmp_path / "options.yaml", options)
    args = ["--shard-mb", "9", f"--config={file}", "--form.split", "train", "--out", "o"]
    config = read_options(TokenizeConfig, description="", args=args)
    form = DocumentFormat(block_chars=10, split="train")
    assert config == TokenizeConfig(inputs=("a",), tokenizer="t", shard_mb=9, form=form, out="o")


def test_what_a_manifest_holds_under_config_makes_an_equal_artifact(tmp_path: Path) -> None:
    folder = str(tmp_path / "fgrams")
    made = CountConfig(tokens="t", num_fgrams=4, exclude_tokens=(3,), max_n=3, out=folder)
    manifest = write_fgrams(folder, [[1, 2, 1, 2, 1, 2]], num_fgrams=4, max_n=3)
    shared = shared_fields(FGramsManifest, made, manifest.inputs)
    manifest = FGramsManifest.model_validate({**manifest.model_dump(), **shared})
    (tmp_path / "fgrams" / "manifest.json").write_text(manifest.model_dump_json())
    file = write(tmp_path / "c.json", load_manifest(FGramsManifest, folder).config)
    args = ["--config", file, "--tokens", "elsewhere", "--out", "another"]
    again = read_options(CountConfig, description="", args=args)
    assert again.semantic_fields() == made.semantic_fields() == manifest.config


def test_fields_that_neither_file_nor_command_line_gives_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "options.yaml", {"tokens": "t"})
    with pytest.raises(SystemExit) as exit_info:
        read_options(CountConfig, description="", args=["--config", file, "--out", "o"])
    assert exit_info.value.code == 2
    message = capsys.readouterr().err
    assert "--num-fgrams" in message
    assert "--tokens" not in message


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"num_fgram": 1}, "'num_fgram' is no option of this script; did you mean 'num_fgrams'?"),
        ({"num-fgrams": 1}, "did you mean 'num_fgrams'?"),
        ({"tracking": {"url": "x"}}, "'tracking.url' is no option .* 'tracking.uri'?"),
        ({"xyzzy": 1}, "`--help` lists the options"),
        ({"num_fgrams": "many"}, "num_fgrams='many': Input should be a valid integer"),
        ({"num_fgrams": 0}, "num_fgrams=0: Input should be greater than or equal to 1"),
        ({"tokens": 5}, "tokens=5: Input should be a valid string"),
        ({"cluster": {"num_cpus": "x"}}, "cluster.num_cpus='x': Input should be a valid integer"),
        ({"contract": "fgrams/v1", "config": {}}, "what it holds under its key `config`"),
        ([1, 2], "holds no options"),
    ],
)
def test_a_bad_file_is_refused_in_one_line_with_file_key_and_remedy(
    content: Any, reason: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "options.yaml", content)
    with pytest.raises(ValueError, match=reason) as error:
        read_options(CountConfig, description="", args=["--config", file])
    assert file in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "text"), [("a.yaml", "a: [1"), ("a.json", '{"a": 1')])
def test_a_damaged_file_is_refused(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match="not readable .*; mend the file"):
        read_options(CountConfig, description="", args=["--config", str(tmp_path / name)])


def test_each_command_of_a_script_takes_a_file_of_its_own(tmp_path: Path) -> None:
    file = write(tmp_path / "options.yaml", {"table": "t", "num_rows": 5})
    args = ["--config", file, "--checkpoint", "c", "--fgrams", "f"]
    command = read_command(TABLE_COMMANDS, description="", args=["verify", *args])
    assert command == VerifyConfig(table="t", checkpoint="c", fgrams="f", num_rows=5)
    with pytest.raises(ValueError, match="'num_rows' is no option"):
        read_command(TABLE_COMMANDS, description="", args=["convert", *args])


def test_a_missing_file_ends_a_script_with_one_line() -> None:
    command = [sys.executable, ROOT / "pipelines" / "fgram_grow.py", "--config", "nowhere.yaml"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        "error: --config nowhere.yaml: no such file; name a YAML or JSON file of options"
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_reads_its_options_where_config_is_known(script: str) -> None:
    """`--help` of all of them says so; running it takes seconds each."""
    text = (ROOT / "pipelines" / script).read_text()
    assert "tyro" not in text
    assert any(name in text for name in ("read_options(", "read_command(", "main("))


def test_help_says_what_config_is(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["convert", "--help"], ["verify", "--help"]):
        with pytest.raises(SystemExit):
            read_command(TABLE_COMMANDS, description="", args=args)
        assert "--config FILE" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        read_options(GrowConfig, description="", args=["--help"])
    assert "--config FILE" in capsys.readouterr().out
