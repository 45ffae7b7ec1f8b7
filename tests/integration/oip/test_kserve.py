"""KServe's own client, run by an interpreter of its own: it needs other versions of packages than this project."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("kserve_client.py")
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 12)
WANTED = (X - X.mean(1, keepdims=True)) / np.sqrt(X.var(1, keepdims=True) + 1e-5)


@pytest.fixture(scope="module")
def told(server, kserve_python):
    done = subprocess.run(
        [kserve_python, SCRIPT, server.url],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        # Its interpreter is not to find this project's packages.
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_server_and_its_models_are_ready(told):
    assert (told["live"], told["ready"], told["model"]) == (True, True, True)


@pytest.mark.parametrize(
    ("kind", "datatype", "tolerance"), [("json", "FP32", 1e-5), ("binary", "FP32", 1e-5), ("half", "FP16", 4e-3)]
)
def test_inference(told, kind, datatype, tolerance):
    *said, y = told[kind]
    assert said == ["7", "layer_norm", "y", datatype]
    np.testing.assert_allclose(y, WANTED, atol=tolerance)


@pytest.mark.parametrize(("kind", "message", "status"), [("unknown", "no model", 404), ("wrong", "dy", 422)])
def test_errors_are_the_clients_exceptions(told, kind, message, status):
    assert message in told[kind]
    assert f"'{status} " in told[kind]
