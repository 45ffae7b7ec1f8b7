"""A file of API keys for tests, and what each of them may do."""

from pathlib import Path

from normserve.admission.keys.keys_file import format_key_table

INFER, LAYERS, METRICS, EXPIRED, SLOW = "infer-key", "layers-key", "metrics-key", "old-key", "slow-key"
EVERYTHING = "everything-key"


def table(name: str, secret: str, may: str, more: str = "") -> str:
    """One key as the file has it."""
    return format_key_table(name, secret).replace('["infer"]', may) + more + "\n"


KEYS = (
    table("reader", INFER, '["infer"]')
    + table("admin", LAYERS, '["layers"]')
    + table("prometheus", METRICS, '["metrics"]')
    + table("old", EXPIRED, '["infer", "layers", "metrics"]', "expires = 2020-01-01T00:00:00Z\n")
    + table("slow", SLOW, '["infer"]', "requests_per_second = 0.001\n")
    + table("root", EVERYTHING, '["infer", "layers", "metrics"]')
)


def write_keys(folder: Path, content: str = KEYS) -> Path:
    """The file of keys, readable by its owner."""
    path = folder / "keys.toml"
    path.touch(0o600)
    path.write_text(content)
    return path


def bearing(key: str | None) -> dict[str, str]:
    """The headers that bring a key."""
    return {} if key is None else {"authorization": f"Bearer {key}"}
