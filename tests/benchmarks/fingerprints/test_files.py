from benchmarks.fingerprints import files


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "folder" / "file.txt"
    assert files.read_fingerprints(path) == ("", {})
    files.write_fingerprints(path, "# head", {"b c": "two", "a": "one: 1"})
    assert path.read_text() == "# head\na: one: 1\nb c: two\n"
    assert files.read_fingerprints(path) == ("# head", {"a": "one: 1", "b c": "two"})
