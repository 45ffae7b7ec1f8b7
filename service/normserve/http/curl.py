"""Examples and hints for users of curl."""


def curl_line(url: str, *, with_key: bool, with_certificate: bool = False) -> str:
    """A line that normalises the sample with nothing but curl and a shell."""
    curl = curl_command(url, with_certificate=with_certificate)
    key = ' -H "Authorization: Bearer $NORMSERVE_API_KEY"' if with_key else ""
    return f"{curl} {url}/sample.npy | {curl}{key} --data-binary @- -D - -o y.npy {url}/v1/layer_norm"


def curl_command(url: str, *, with_certificate: bool) -> str:
    """curl with the files that TLS needs: of the server's authority, and a client's certificate with its key."""
    if not url.startswith("https:"):
        return "curl -s"
    return "curl -s --cacert ca.pem" + (" --cert client.pem" if with_certificate else "")
