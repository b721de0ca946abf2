"""The server of cluster/mlflow.yaml answers to the names it is reached by, and to no other."""

import re
import subprocess
from collections.abc import Generator
from http.client import HTTPConnection

import pytest
import yaml

from tests import ROOT
from tests.programs.processes import free_port, kill_group, script, wait_until

RECIPE = ROOT / "cluster" / "mlflow.yaml"


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Generator[int]:
    """A server with the arguments of the recipe; its port and its folders are ours."""
    folder, port = tmp_path_factory.mktemp("mlflow"), free_port()
    (deployment,) = (
        document
        for document in yaml.safe_load_all(RECIPE.read_text())
        if document["kind"] == "Deployment"
    )
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    arguments = [
        re.sub("/mlflow", str(folder), argument)
        .replace("--host=0.0.0.0", "--host=127.0.0.1")
        .replace("--port=5000", f"--port={port}")
        for argument in container["command"][1:]
    ]
    command = [script(container["command"][0]), *arguments, "--workers=1"]
    server = subprocess.Popen(command, start_new_session=True)
    try:
        wait_until(lambda: answers(port))
        yield port
    finally:
        kill_group(server.pid)
        server.wait()


def status(port: int, host: str) -> int:
    """Of an API request for a host name."""
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    path = "/api/2.0/mlflow/experiments/get?experiment_id=0"
    connection.request("GET", path, headers={"Host": host})
    return connection.getresponse().status


def answers(port: int) -> bool:
    try:
        return status(port, "localhost") == 200
    except OSError:
        return False


@pytest.mark.parametrize(
    "host", ["scone-mlflow", "scone-mlflow:5000", "localhost", "localhost:5000"]
)
def test_known_names_are_answered_with_and_without_port(port: int, host: str) -> None:
    """mlflow/mlflow#22095, #18574: 403 when reached by service name."""
    assert status(port, host) == 200


def test_other_names_are_refused(port: int) -> None:
    assert status(port, "rebound.example.com") == 403
