"""A stage's configuration, inputs and build -> its published artifact: the frame of every stage."""

from collections.abc import Callable, Mapping

from ray_jobs.runtime.config import JobConfig
from ray_jobs.runtime.tracking import RunLog
from scone_core.artifacts.folders import SharedFields, claim, publish, shared_fields
from scone_core.artifacts.manifests import AnyManifest


def run_stage(
    kind: type[AnyManifest],
    config: JobConfig,
    inputs: Mapping[str, str],
    build: Callable[[SharedFields, RunLog], AnyManifest],
    *,
    stage: str,
) -> AnyManifest:
    """The artifact at `config.out`: the finished one, or the one that `build` makes now.

    The order is the same for every stage: claim the folder, build, record, publish. What the run
    logs is durable in the folder before the manifest is written; sending it to the tracking store
    never delays a build by more than a failed connection, and never prevents a publication.

    Args:
        inputs: the fingerprint of every input, by the name of the config field that points to it.
        build: does the work in `config.out` and returns the manifest, `kind(**shared, ...)`. It
            logs to the RunLog that it is given, and connects to Ray if it needs Ray.
        stage: the first word of the stage's lines on the terminal.

    Raises:
        ArtifactError: the folder belongs to another configuration.
        ValueError: `tracking.uri` names no store that MLflow has.
    """
    log = RunLog(config, stage=stage)
    if done := claim(kind, config.out, config, inputs):
        print(f"{stage}: {config.out} is up to date")
        log.send()
        return done
    shared = shared_fields(kind, config, inputs)
    with log.run(shared["fingerprint"]):
        manifest = build(shared, log)
        log.log_dict(manifest.model_dump(mode="json"), "manifest.json")
        publish(config.out, manifest)
    return manifest
