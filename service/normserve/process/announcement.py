"""The message of a server that is ready."""

from normserve.http.curl import make_example_line
from normserve.settings import Settings


def print_announcement(settings: Settings, url: str) -> None:
    """Print the URL for operations, with an example command; print nothing if the log format is JSON."""
    if settings.log_format == "json":
        return
    with_key = settings.api_key is not None or settings.api_keys_file is not None
    example = make_example_line(url, with_key=with_key, with_certificate=settings.tls_client_ca is not None)
    print(f"\nPOST a tensor to {url}/v1/layer_norm, for example:\n\n  {example}\n", flush=True)
