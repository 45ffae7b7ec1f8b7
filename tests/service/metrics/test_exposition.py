"""What is written is what prometheus_client reads, of one process and of several."""

import functools

import pytest
from normserve.metrics.exposition import TextExposition, convert_to_open_metrics, merge_expositions, strip_exemplars
from normserve.metrics.instruments import Counter, Exemplar, Gauge, Histogram, MetricFamily
from normserve.metrics.metrics import Metrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
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
    sent = MetricFamily("sent_total", "Sent.", ("op",), Counter)
    sent("a").inc(2)
    sent("b").inc(1e21)
    inside = MetricFamily("inside", "Inside.", (), Gauge)
    inside().set(3)
    took = MetricFamily("took_seconds", "Took.", ("op",), functools.partial(Histogram, (0.25, 0.5)))
    for value in (0.2, 0.5, 7.0):
        took("a").observe(value)
    return sent, inside, took


def test_everything_is_read_back(families):
    samples, kinds = read(TextExposition(families, {}).render())
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
    exposition = TextExposition(families, {})
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
    family = MetricFamily("roof", "Of\nthe \\device.", ("device",), Gauge)
    family(name).set(1)
    samples, _ = read(TextExposition([family], {}).render())
    assert samples == {("roof", (("device", name),)): 1}


def test_labels_that_all_carry_come_first(families):
    text = TextExposition(families, {"process": "1"}).render().decode()
    assert 'inside{process="1"} 3.0\n' in text
    assert 'took_seconds_bucket{process="1",op="a",le="+Inf"} 3\n' in text


def test_a_family_stands_once_for_all_processes(families):
    texts = {name: TextExposition(families, {"process": name}).render() for name in "20"}
    merged_text = merge_expositions(texts, "012")
    samples, kinds = read(merged_text)
    assert merged_text.count(b"# TYPE sent_total ") == 1
    assert kinds["took_seconds"] == "histogram"
    for index in "02":
        assert samples["sent_total", (("process", index), ("op", "a"))] == 2
    up = {labels[0][1]: value for (name, labels), value in samples.items() if name == "normserve_process_up"}
    assert up == {"0": 1, "1": 0, "2": 1}


def read_open(text: bytes):
    """Samples, and exemplars' trace ids and values, by name and labels."""
    families = list(open_families(text.decode()))
    samples = {
        (each.name, tuple(each.labels.items())): (each.value, each.exemplar)
        for family in families
        for each in family.samples
    }
    exemplars = {
        place: (each.labels, each.value, float(each.timestamp))
        for place, (_, each) in samples.items()
        if each is not None
    }
    return {place: value for place, (value, _) in samples.items()}, exemplars


def test_openmetrics_has_the_same_samples_and_the_exemplars(families):
    took = families[2]("a")
    for value in (0.25, 7.0):
        took.attach_exemplar(Exemplar("ab" * 16, value, 1700000000.125))
    text = TextExposition(families, {}).render()
    samples, exemplars = read_open(convert_to_open_metrics(text))
    assert samples == read(strip_exemplars(text))[0]
    assert exemplars == {
        ("took_seconds_bucket", (("op", "a"), ("le", le))): ({"trace_id": "ab" * 16}, value, 1700000000.125)
        for le, value in (("0.25", 0.25), ("+Inf", 7.0))
    }


def test_the_plain_text_does_not_change_with_exemplars(families):
    exposition = TextExposition(families, {})
    before = exposition.render()
    assert strip_exemplars(before) == before
    families[2]("a").attach_exemplar(Exemplar("ab" * 16, 0.5, 1.0))
    after = exposition.render()
    assert b"trace_id" in after
    assert strip_exemplars(after) == before


def test_what_looks_like_an_exemplar_in_a_label_stays():
    family = MetricFamily("roof", "Of it.", ("device",), Gauge)
    name = 'a # {trace_id="0"} 1'
    family(name).set(1)
    text = TextExposition([family], {}).render()
    assert read(strip_exemplars(text))[0] == {("roof", (("device", name),)): 1}
    assert read_open(convert_to_open_metrics(text))[0] == {("roof", (("device", name),)): 1}


def test_all_processes_exemplars_are_there(families):
    families[2]("a").attach_exemplar(Exemplar("ab" * 16, 0.5, 1.0))
    texts = {name: TextExposition(families, {"process": name}).render() for name in "01"}
    _, exemplars = read_open(convert_to_open_metrics(merge_expositions(texts, "01")))
    assert [dict(labels)["process"] for _, labels in exemplars] == ["0", "1"]


def test_everything_that_is_counted_is_openmetrics():
    text = Metrics().render()
    assert read_open(convert_to_open_metrics(text))[0].keys() == read(strip_exemplars(text))[0].keys()
