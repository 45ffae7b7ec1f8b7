"""What is written is what prometheus_client reads, of one process and of several."""

import functools

import pytest
from normserve.metrics.exposition import Exposition, merged
from normserve.metrics.instruments import Counter, Family, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families


def read(text: bytes):
    """Samples by name and labels, each of which is there once; and the kinds of the families."""
    families = list(text_string_to_metric_families(text.decode()))
    samples = [
        ((sample.name, tuple(sample.labels.items())), sample.value)
        for family in families
        for sample in family.samples
    ]
    assert len(samples) == len(dict(samples))
    return dict(samples), {family.name: family.type for family in families}


@pytest.fixture
def families():
    sent = Family("sent_total", "Sent.", ("op",), Counter)
    sent("a").inc(2)
    sent("b").inc(1e21)
    inside = Family("inside", "Inside.", (), Gauge)
    inside().set(3)
    took = Family("took_seconds", "Took.", ("op",), functools.partial(Histogram, (0.25, 0.5)))
    for value in (0.2, 0.5, 7.0):
        took("a").observe(value)
    return sent, inside, took


def test_everything_is_read_back(families):
    samples, kinds = read(Exposition(families, {}).render())
    assert kinds == {"sent": "counter", "inside": "gauge", "took_seconds": "histogram"}
    assert samples == {
        ("sent_total", (("op", "a"),)): 2,
        ("sent_total", (("op", "b"),)): 1e21,
        ("inside", ()): 3,
        ("took_seconds_bucket", (("op", "a"), ("le", "0.25"))): 1,
        ("took_seconds_bucket", (("op", "a"), ("le", "0.5"))): 2,
        ("took_seconds_bucket", (("op", "a"), ("le", "+Inf"))): 3,
        ("took_seconds_count", (("op", "a"),)): 3,
        ("took_seconds_sum", (("op", "a"),)): 7.7,
    }


def test_what_came_since_is_told_the_next_time(families):
    exposition = Exposition(families, {})
    before, _ = read(exposition.render())
    families[0]("a").inc()
    families[0]("c").inc()
    after, _ = read(exposition.render())
    assert after.items() - before.items() == {
        (("sent_total", (("op", "a"),)), 3),
        (("sent_total", (("op", "c"),)), 1),
    }


def test_quotes_backslashes_and_line_ends_survive():
    name = 'NVIDIA "H200"\\0\nx'
    family = Family("roof", "Of\nthe \\device.", ("device",), Gauge)
    family(name).set(1)
    samples, _ = read(Exposition([family], {}).render())
    assert samples == {("roof", (("device", name),)): 1}


def test_labels_that_all_carry_come_first(families):
    text = Exposition(families, {"process": "1"}).render().decode()
    assert 'inside{process="1"} 3.0\n' in text
    assert 'took_seconds_bucket{process="1",op="a",le="+Inf"} 3\n' in text


def test_a_family_stands_once_for_all_processes(families):
    texts = {name: Exposition(families, {"process": name}).render() for name in "20"}
    merged_text = merged(texts, "012")
    samples, kinds = read(merged_text)
    assert merged_text.count(b"# TYPE sent_total ") == 1
    assert kinds["took_seconds"] == "histogram"
    for index in "02":
        assert samples["sent_total", (("process", index), ("op", "a"))] == 2
    up = {labels[0][1]: value for (name, labels), value in samples.items() if name == "normserve_process_up"}
    assert up == {"0": 1, "1": 0, "2": 1}
