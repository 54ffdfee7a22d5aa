"""The `explorer.external_model` section: an endpoint that is scored in place of the engines."""

from __future__ import annotations

from trinity_core.config.section import Section
from trinity_core.config.types import EMPTY, Args, Count, Natural, Seconds


class ExternalModelConfig(Section):
    """An OpenAI-compatible endpoint that `mode: bench` and `trinity evaluate` score; the run has no engines then."""

    base_url: str = ""
    """Address of the API, such as `https://api.openai.com/v1`; without credentials."""
    model_name: str = ""
    """The model's name at the endpoint."""
    api_key_env: str | None = None
    """Environment variable that holds the key; null sends none."""
    timeout: Seconds = 300.0
    """Time for one attempt at a request."""
    max_retry_times: Natural = 6
    """Retries of a request that was refused for now (429), failed (5xx), broke off or took too long, with growing
    pauses; all of them within 90 % of `explorer.max_timeout`."""
    requests_at_once: Count = 32
    """Requests in flight."""
    request_args: Args = EMPTY
    """Further keys of each request's body, such as `reasoning_effort`; null leaves out a key that is sent otherwise."""
