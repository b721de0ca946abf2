"""Ray Serve LLM's OpenAI routes, with errors in OpenAI's form where Ray's own are not."""

from fastapi import HTTPException
from ray.serve.llm.ingress import OpenAiIngress


class UnknownModelError(ValueError):
    """Ray answers exceptions that have a status code with it and an OpenAI-style body."""

    status_code = 404


class Ingress(OpenAiIngress):
    """Ray refuses an unknown model with FastAPI's `{"detail": ...}`, which clients cannot read."""

    async def _get_model_id(self, model: str | None) -> str:
        try:
            return await super()._get_model_id(model)
        except HTTPException as error:
            raise UnknownModelError(
                f"model={model!r} is not served here; /v1/models lists what is"
            ) from error
