"""A local `ray start --head` cluster as a user starts it, on ports of its own, and its end."""

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.programs.processes import free_port, kill_group, script, wait_until


class Head:
    """The cluster's processes; applications are deployed with the `serve` command."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="scone"))  # paths of Ray's sockets must be short
        dashboard = free_port()
        self.address = f"http://127.0.0.1:{dashboard}"
        options = {
            "port": free_port(),
            "dashboard-port": dashboard,
            "dashboard-agent-listen-port": free_port(),
            "ray-client-server-port": free_port(),
            "min-worker-port": 0,
            "max-worker-port": 0,
            "num-cpus": 4,
            "object-store-memory": 100 << 20,
            "temp-dir": self.folder,
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        self.process = subprocess.Popen(
            [script("ray"), "start", "--head", "--block", *words],
            env=os.environ | {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "2"},
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(self._answers)

    def deploy(self, applications: dict[str, Any]) -> None:
        """`serve deploy` of the content of a serve.yaml."""
        path = self.folder / "serve.yaml"
        path.write_text(yaml.safe_dump(applications))
        subprocess.run(
            [script("serve"), "deploy", str(path), "--address", self.address], check=True
        )

    def status(self, application: str) -> tuple[str, str]:
        """Status and message of an application."""
        details = httpx.get(f"{self.address}/api/serve/applications/", timeout=60).json()
        found = details["applications"].get(application, {"status": "ABSENT", "message": ""})
        return found["status"], found["message"]

    def wait_for(self, application: str) -> tuple[str, str]:
        """Its status and message once it is either running or given up."""
        wait_until(lambda: self.status(application)[0] in ("RUNNING", "DEPLOY_FAILED"))
        return self.status(application)

    def stop(self) -> None:
        """End all of its processes, engines included."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=60)
        finally:
            kill_group(self.process.pid)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _answers(self) -> bool:
        assert self.process.poll() is None, "ray start has ended"
        try:
            return httpx.get(f"{self.address}/api/version").is_success
        except httpx.TransportError:
            return False
