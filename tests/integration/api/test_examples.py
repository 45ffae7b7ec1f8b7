"""The examples of the API's description: a server takes those requests, and answers in that form."""

import re
import subprocess

import pytest
import torch
from normserve.client import Client
from normserve.http.routes.api_descriptions import EXAMPLE_PARAMETERS, find_example, make_command_line
from normserve.jobs.job import LAYER_OPS, Op, PassDirection

from tests.integration.harness.wire import packed

NAME = "encoder.LayerNorm"
FORMS = [
    ("GET", "/livez"),
    ("GET", "/readyz"),
    ("GET", "/v1/info"),
    ("GET", "/v1/layers"),
    ("GET", "/v1/layers/{name}"),
    ("GET", "/v2"),
    ("GET", "/v2/health/live"),
    ("GET", "/v2/health/ready"),
    ("POST", "/v2/models/{name}/infer"),
    ("GET", "/v2/models/{name}"),
    ("GET", "/v2/models/{name}/ready"),
    ("GET", "/v2/models/{name}/config"),
    ("GET", "/v2/models/{name}/stats"),
    ("GET", "/v2/models/{name}/versions/{version}/stats"),
    ("GET", "/v2/models/stats"),
    ("POST", "/v2/repository/index"),
    ("POST", "/v2/repository/models/{name}/load"),
]


@pytest.fixture(scope="module")
def http(launched):
    with launched().client() as http:
        put = http.put(
            f"/v1/layers/{NAME}?op=layer_norm", content=packed(weight=torch.ones(4), bias=torch.zeros(4))
        )
        assert form(put.json()) == form(find_example("PUT", "/v1/layers/{name}").response_body)
        yield http


def form(value):
    """Names and kinds without values; of a list the first."""
    if isinstance(value, dict):
        return {name: form(each) for name, each in value.items()}
    if isinstance(value, list):
        return [form(each) for each in value[:1]]
    return type(value)


@pytest.mark.parametrize(("method", "path"), FORMS)
def test_an_answer_has_the_form_of_its_example(http, method, path):
    example = find_example(method, path)
    filled = path.format(**EXAMPLE_PARAMETERS)
    answer = http.request(method, filled, json=example.request_body)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(example.media_type)
    if isinstance(example.response_body, str):
        assert answer.text == example.response_body
        return
    told, shown = form(answer.json()), form(example.response_body)
    if path == "/v1/info":
        # A server on the CPU has no Triton.
        assert shown["versions"].pop("triton") is str
        # Only with front ends.
        told.pop("front_ends", None)
    assert told == shown


def test_the_example_of_an_inference_is_its_result(http):
    example = find_example("POST", "/v2/models/{name}/infer")
    answer = http.post(f"/v2/models/{NAME}/infer", json=example.request_body).json()
    (told,), (shown,) = answer["outputs"], example.response_body["outputs"]
    assert told["data"] == pytest.approx(shown["data"], abs=1e-6)


@pytest.mark.parametrize("op", LAYER_OPS)
def test_the_lines_of_an_operation_run(http, op, tmp_path):
    url = str(http.base_url).rstrip("/")
    line = make_command_line(op, PassDirection.FORWARD)
    subprocess.run(["sh", "-c", line], cwd=tmp_path, env={"URL": url}, check=True)
    assert (tmp_path / "y.npy").read_bytes().startswith(b"\x93NUMPY")
    x = torch.randn(2, 4)
    known = {"dy": x, "x": x, "weight": torch.ones(4)}
    with Client(url) as client:
        (arguments,) = re.fullmatch(
            rf"normserve\.client\.Client\(URL\)\.{op.value}_backward(\(.*\))",
            make_command_line(op, PassDirection.BACKWARD),
        ).groups()
        call = getattr(client, f"{op.value}_backward")
        result = eval(f"call{arguments}", {"call": call, **known})
    assert result.dx.shape == x.shape


def test_the_line_of_a_chain_runs(http):
    line = make_command_line(Op.LAYER_NORM_CHAIN, PassDirection.FORWARD)
    call = re.fullmatch(r"normserve\.client\.Client\(URL\)(\..*)", line)
    with Client(str(http.base_url)) as client:
        x, weight = torch.ones(4, 8), torch.full((8,), 2.0)
        result = eval(f"client{call[1]}", {"client": client, "x": x, "weight": weight})
    assert result.y.shape == (4, 8)
