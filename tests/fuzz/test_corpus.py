"""Every input that is kept, without a fuzzer."""

import pytest

from .__main__ import CORPUS
from .harnesses import HARNESSES


@pytest.mark.parametrize("name", HARNESSES)
def test_corpus_meets_no_fault(name):
    inputs = sorted((CORPUS / name).iterdir())
    assert inputs
    for each in inputs:
        HARNESSES[name](each.read_bytes())
    HARNESSES[name](b"")


def test_every_corpus_has_a_harness():
    assert {each.name for each in CORPUS.iterdir()} == set(HARNESSES)
