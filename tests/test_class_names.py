"""A class's name is used once, so that whoever reads it somewhere knows which class is meant."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent

COUNTERPARTS = (
    {"service/normserve/errors/__init__.py", "service/normserve/client/errors.py"},
    {"kernels/fusednorm/api/modules.py", "service/normserve/client/torch/modules.py"},
)
"""Files whose classes may have the same name: errors of server and client, and modules named as torch's."""

SINGLE_WORDS = {
    *("Activation", "Array", "Backward", "Backend", "Batch", "Batcher", "Client", "Counter", "Deadline", "Engine"),
    *("Exemplar", "Executor", "Forward", "Gauge", "Histogram", "Keyring", "Launch", "Metrics", "Op", "Permit"),
    *("Settings", "Tenant", "Timing", "Workload", "Workspace"),
    # Results that users unpack.
    "Added",
}
"""Classes that have the field's own name for what they are, or a public name."""


def classes():
    for package in ("kernels/fusednorm", "service", "loadtest", "benchmarks"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    yield node.name, str(path.relative_to(ROOT))


def test_no_two_classes_have_the_same_name():
    places = defaultdict(set)
    for name, path in classes():
        assert path not in places[name], f"{name} is two classes in {path}"
        places[name].add(path)
    shared = {name: paths for name, paths in places.items() if len(paths) > 1 and paths not in COUNTERPARTS}
    assert shared == {}
    assert len(places) > 700


def test_a_class_has_more_than_one_word_unless_the_word_is_the_fields_own():
    words = re.compile(r"[A-Z][a-z0-9]+|[A-Z]+(?![a-z])")
    single = {name for name, _ in classes() if len(words.findall(name)) < 2}
    assert single - SINGLE_WORDS == set()
    assert single > {"Engine", "Permit"}
