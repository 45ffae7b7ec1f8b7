"""What a file of API keys may say, and that nothing else passes."""

import hashlib

import pytest
from normserve.admission.keys import ApiKey, KeyScope, KeysFileError, parse_keys
from normserve.admission.keys.keys_file import MAX_KEYS, format_key_table, generate_key

DIGEST = hashlib.sha256(b"a key").hexdigest()
SECRET = "wF8-typed-in-the-wrong-place"


def one(**changed: str) -> bytes:
    """A file of one key, some of its fields as TOML changed; those of an empty text left out."""
    fields = {"name": '"team"', "sha256": f'"{DIGEST}"', "may": '["infer"]'} | changed
    lines = [f"{name} = {value}" for name, value in fields.items() if value]
    return "\n".join(["[[keys]]", *lines]).encode()


def test_the_least_that_a_key_says():
    digest = hashlib.sha256(b"a key").digest()
    assert parse_keys(one()) == (ApiKey("team", digest, frozenset([KeyScope.INFER])),)


def test_everything_that_a_key_can_say():
    (key,) = parse_keys(
        one(
            may='["metrics", "layers", "infer"]',
            expires="2030-01-01T02:00:00+02:00",
            requests_per_second="2.5",
            max_inflight_bytes="1_000",
        )
    )
    assert key.scopes == frozenset(KeyScope)
    assert key.expires == 1893456000
    assert (key.requests_per_second, key.max_inflight_bytes) == (2.5, 1000)


def test_a_digest_may_be_in_capitals_and_a_rate_whole():
    (key,) = parse_keys(one(sha256=f'"{DIGEST.upper()}"', requests_per_second="5"))
    assert key.digest.hex() == DIGEST
    assert key.requests_per_second == 5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("name", '""'),
        ("name", '"two words"'),
        ("name", '"line\\n"'),
        ("name", '"é"'),
        ("name", f'"{"a" * 65}"'),
        ("name", "1"),
        ("sha256", ""),
        ("sha256", f'"{DIGEST[:-1]}"'),
        ("sha256", f'"{DIGEST[:-1]}g"'),
        ("sha256", f'"{DIGEST}\\n"'),
        ("sha256", "12"),
        ("may", ""),
        ("may", "[]"),
        ("may", '"infer"'),
        ("may", '["infer", "infer"]'),
        ("may", '["everything"]'),
        ("may", "[1]"),
        ("expires", '"2030-01-01T00:00:00Z"'),
        ("expires", "2030-01-01T00:00:00"),
        ("expires", "2030-01-01"),
        ("expires", "1893456000"),
        ("requests_per_second", "0"),
        ("requests_per_second", "-1"),
        ("requests_per_second", "nan"),
        ("requests_per_second", "inf"),
        ("requests_per_second", "true"),
        ("requests_per_second", '"5"'),
        ("max_inflight_bytes", "0"),
        ("max_inflight_bytes", "1.5"),
        ("max_inflight_bytes", "true"),
        ("max_inflight_bytes", "9223372036854775808"),
        ("another", "1"),
    ],
)
def test_a_wrong_field_is_refused_by_its_place(field, value):
    with pytest.raises(KeysFileError, match=r"^keys\[0\]\.(\(another field\)|" + field + r")(\[0\])?: "):
        parse_keys(one(**{field: value}))


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("name", '"two words"', "must be 1 to 64 of the characters"),
        ("sha256", '"12"', "must be 64 hexadecimal digits"),
        ("may", '["everything"]', "must be a list of infer, layers, metrics"),
        ("expires", "2030-01-01T00:00:00", "must be a date and a time with an offset"),
    ],
)
def test_an_error_says_in_words_what_is_expected(field, value, expected):
    with pytest.raises(KeysFileError, match=rf"^keys\[0\]\.{field}: {expected}"):
        parse_keys(one(**{field: value}))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"keys = []",
        b"keys = 1",
        b'[keys]\nname = "team"',
        b"[[keys]",
        b"\xff",
        b"a = " + b"[" * 5000,
        one() + b"\n[limits]\n",
    ],
)
def test_a_file_of_another_kind_is_refused(content):
    with pytest.raises(KeysFileError):
        parse_keys(content)


def test_two_keys_share_neither_name_nor_hash():
    other = hashlib.sha256(b"another").hexdigest()
    with pytest.raises(KeysFileError, match=r"keys\[1\]\.name is that of keys\[0\]"):
        parse_keys(one() + b"\n" + one(sha256=f'"{other}"'))
    with pytest.raises(KeysFileError, match=r"keys\[1\]\.sha256 is that of keys\[0\]"):
        parse_keys(one() + b"\n" + one(name='"other"', sha256=f'"{DIGEST.upper()}"'))


def test_keys_are_not_without_number():
    many = [one(name=f'"k{i}"', sha256=f'"{i:064x}"') for i in range(MAX_KEYS + 1)]
    assert len(parse_keys(b"\n".join(many[:-1]))) == MAX_KEYS
    with pytest.raises(KeysFileError, match="keys: "):
        parse_keys(b"\n".join(many))


@pytest.mark.parametrize(
    "content",
    [
        one(sha256=f'"{SECRET}"'),
        one(name=f'"{SECRET} and words"'),
        one(may=f'["{SECRET}"]'),
        one(**{f'"{SECRET}"': "1"}),
        one() + f"\n{SECRET}".encode(),
        f'[[keys]]\nname = "{SECRET}'.encode(),
    ],
)
def test_a_fault_repeats_nothing_of_the_file(content):
    with pytest.raises(KeysFileError) as caught:
        parse_keys(content)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_a_new_key_is_that_of_its_entry():
    key = generate_key()
    assert key != generate_key()
    assert len(key) >= 43
    (parsed,) = parse_keys(format_key_table("team-1", key).encode())
    assert parsed == ApiKey("team-1", hashlib.sha256(key.encode()).digest(), frozenset([KeyScope.INFER]))


@pytest.mark.parametrize("name", ["", "two words", 'a"\nmay = []', "a" * 65, "a\n"])
def test_no_entry_has_a_name_that_the_file_may_not(name):
    with pytest.raises(ValueError, match="a key's name must be"):
        format_key_table(name, "key")
