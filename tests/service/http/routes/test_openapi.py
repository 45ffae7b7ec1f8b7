"""The API's description: complete, and true of what the server says."""

import copy
import re
from collections.abc import Iterator

import httpx
import pytest
from normserve.errors import NormserveError
from normserve.errors.problems import STATUSES
from normserve.http.app import create_app
from normserve.http.routes.openapi import make_operation_id
from normserve.settings import Settings

PROBLEM = "application/problem+json"


@pytest.fixture(scope="module")
def described():
    return create_app(Settings(backend="torch")).openapi()


def operations(described) -> Iterator[tuple[str, str, dict]]:
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def test_it_is_valid(described):
    # Imported here, since it makes dozens of parsers, which takes longer than to import torch.
    import openapi_spec_validator

    openapi_spec_validator.validate(described)
    locked = create_app(Settings(backend="torch", api_key="s3cret")).openapi()
    openapi_spec_validator.validate(locked)
    broken = copy.deepcopy(described)
    del broken["paths"]["/v1/layers/{name}"]["get"]["parameters"]
    with pytest.raises(openapi_spec_validator.validation.exceptions.OpenAPIValidationError):
        openapi_spec_validator.validate(broken)


def test_it_has_every_route(described):
    routes = create_app(Settings(backend="torch")).state.routes
    shown = {(method, route.path) for route in routes if route.include_in_schema for method in route.methods}
    told = {(method.upper(), path) for method, path, _ in operations(described)}
    assert told == {(method, path) for method, path in shown if method != "HEAD"}


def test_operation_ids_are_unique_names(described):
    ids = [operation["operationId"] for _, _, operation in operations(described)]
    assert len(set(ids)) == len(ids)
    assert all(each.isidentifier() for each in ids)
    assert make_operation_id("post", "/v1/layer_norm/backward") == "post_v1_layer_norm_backward"
    assert make_operation_id("get", "/v2/models/{name}/stats") != make_operation_id("get", "/v2/models/stats")


def test_every_operation_says_how_it_fails(described):
    schemas = described["components"]["schemas"]
    for method, path, operation in operations(described):
        assert "422" not in operation["responses"]
        (content,) = operation["responses"]["default"]["content"].items()
        name = "Error" if path.startswith("/v2") else "Problem"
        media_type = "application/json" if path.startswith("/v2") else PROBLEM
        assert content[0] == media_type, (method, path)
        assert content[1]["schema"] == {"$ref": f"#/components/schemas/{name}"}
    assert schemas.keys() == {"Error", "Problem"}
    codes = schemas["Problem"]["properties"]["code"]["enum"]
    assert set(codes) == {kind.code for kind in STATUSES} | {NormserveError.code}
    for _, _, operation in operations(described):
        assert operation["responses"]["default"]["headers"]["X-Error-Code"]["schema"]["enum"] == codes


def examples_in(operation: dict) -> Iterator[object]:
    yield from (each["source"] for each in operation.get("x-codeSamples", ()))
    yield from (each["example"] for each in operation.get("parameters", ()) if "example" in each)
    contents = [operation.get("requestBody", {}), *operation["responses"].values()]
    for content in contents[:-1]:
        for media in content.get("content", {}).values():
            if "example" in media:
                yield media["example"]
            yield from media.get("examples", {}).values()


def test_every_operation_has_an_example(described):
    without = [(method, path) for method, path, each in operations(described) if not list(examples_in(each))]
    # These take nothing and answer with nothing.
    assert without == [("post", f"/v2/{kind}sharedmemory/unregister") for kind in ("system", "cuda")]
    sent = described["paths"]["/v1/layer_norm"]["post"]["requestBody"]["content"]["application/x-npy"]
    assert sent["examples"]["sample"]["externalValue"] == "sample.npy"


def test_every_parameter_of_a_path_is_named(described):
    for _, path, operation in operations(described):
        named = [each["name"] for each in operation["parameters"] if each["in"] == "path"]
        assert named == re.findall(r"{(\w+)}", path)


def test_problems_that_are_shown_have_the_schema(described):
    schema = described["components"]["schemas"]["Problem"]
    shown = described["paths"]["/v1/layer_norm"]["post"]["responses"]["default"]["content"][PROBLEM]["examples"]
    assert len(shown) > 2
    for example in shown.values():
        value = example["value"]
        assert value.keys() == schema["properties"].keys()
        assert value["code"] in schema["properties"]["code"]["enum"]
        assert httpx.codes(value["status"]).is_error


def test_a_layer_is_registered_with_its_operation(described):
    parameters = described["paths"]["/v1/layers/{name}"]["put"]["parameters"]
    assert [each["name"] for each in parameters if each["required"]] == ["name", "op"]


def test_inference_takes_and_returns_binary_tensors(described):
    for path in ("/v2/models/{name}/infer", "/v2/models/{name}/versions/{version}/infer"):
        operation = described["paths"][path]["post"]
        for message in (operation["requestBody"], operation["responses"]["200"]):
            assert list(message["content"]) == ["application/json", "application/octet-stream"]
