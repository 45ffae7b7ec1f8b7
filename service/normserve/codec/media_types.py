"""Names of the media types that the codec reads and writes, and their detection by a body's first bytes."""

SAFETENSORS = "application/x-safetensors"
NPY = "application/x-npy"

#: Every name of a format that a client may use, to the name in responses.
CANONICAL = {
    SAFETENSORS: SAFETENSORS,
    "application/vnd.safetensors": SAFETENSORS,
    NPY: NPY,
}

#: Types that say nothing about the body, so that its first bytes decide; the second is curl's default.
UNTYPED = frozenset({"", "application/octet-stream", "application/x-www-form-urlencoded"})

NPY_MAGIC = b"\x93NUMPY"

#: How many of a body's first bytes `detect_binary_media_type` looks at.
SNIFF_BYTES = 9


_JSON_SPACE = frozenset((b" ", b"\t", b"\n", b"\r"))

_ZIP = b"PK\x03\x04"
# The bytes of a zip archive with the length of its first file's name, and the offset of that name.
_ZIP_NAME_BYTES, _ZIP_NAME = slice(26, 28), 30

_JSON_HINT = "send bytes, as numpy.save writes them; operations take JSON below /v2"
_FORM_HINT = "send the file itself, with --data-binary of curl or data= of requests"
_COMPRESSED_HINT = "send the file uncompressed"

# Media types that are often declared by mistake, and what to do instead.
_HINTS_BY_MEDIA_TYPE = {
    "application/json": _JSON_HINT,
    "multipart/form-data": _FORM_HINT,
    "application/gzip": _COMPRESSED_HINT,
    "application/x-gzip": _COMPRESSED_HINT,
    "application/zstd": _COMPRESSED_HINT,
}

# The first bytes of files that are often sent by mistake, and their descriptions.
_FAMILIAR = (
    *(
        (bytes([0x80, protocol]), "a pickle, as old .pt files are: save tensors as safetensors")
        for protocol in range(2, 6)
    ),
    (b"\x89HDF", "HDF5: save one array as .npy, or tensors as safetensors"),
    (b"{", f"JSON: {_JSON_HINT}"),
    (b"[", f"JSON: {_JSON_HINT}"),
    # The beginning of a boundary, as curl and Python's libraries choose it.
    (b"--", f"a form: {_FORM_HINT}"),
    (b"\x1f\x8b", f"gzip: {_COMPRESSED_HINT}"),
    (b"\x28\xb5\x2f\xfd", f"zstd: {_COMPRESSED_HINT}"),
    (b"\xfd7zXZ\0", f"xz: {_COMPRESSED_HINT}"),
    (b"BZh", f"bzip2: {_COMPRESSED_HINT}"),
)


def suggest_media_type(media_type: str) -> str:
    """Return what to do instead of declaring an unsupported media type."""
    return _HINTS_BY_MEDIA_TYPE.get(media_type, "without a Content-Type the body's first bytes decide")


def suggest_supported_format(head: bytes | memoryview) -> str:
    """Describe the unsupported format of a body, and how to send the data instead; return "" for an unknown one.

    Args:
        head: the first bytes, or the complete body.
    """
    start = bytes(head[:SNIFF_BYTES])
    if start.startswith(_ZIP):
        return _suggest_format_for_archive(head)
    for beginning, what in _FAMILIAR:
        if start.startswith(beginning):
            return what
    if NPY_MAGIC[1:] in start:
        return "npy that was changed on its way: send it as bytes, not as text"
    if start and all(byte in b"0123456789+-.eE,; \t\r\n" for byte in start):
        return "text, as CSV files are: numpy.save writes what can be sent"
    return ""


def _suggest_format_for_archive(head: bytes | memoryview) -> str:
    """Describe a zip archive by the name of its first file, and how to send its arrays instead."""
    name = bytes(head[_ZIP_NAME : _ZIP_NAME + int.from_bytes(head[_ZIP_NAME_BYTES], "little")])
    if name.endswith(b".npy"):
        return "an .npz archive of numpy's: send one array as .npy, or all of them as safetensors"
    if name.endswith((b"/data.pkl", b"/version", b"/byteorder", b"/.format_version")):
        return "a .pt file of torch's: save the tensors as safetensors"
    return "a zip archive: send one array as .npy, or tensors as safetensors"


def detect_binary_media_type(head: bytes | memoryview) -> str | None:
    """Detect by a body's first bytes whether it is npy or safetensors, and return that media type, else None.

    Args:
        head: at least the first `SNIFF_BYTES` bytes of the body, or all of a shorter one.
    """
    start = bytes(head[:SNIFF_BYTES])
    if start.startswith(NPY_MAGIC):
        return NPY
    # White space may precede the header; then its length, of which four bytes are 0, shows that this is no text.
    if start[8:9] == b"{" or (start[8:9] in _JSON_SPACE and start[4:8] == bytes(4)):
        return SAFETENSORS
    return None
