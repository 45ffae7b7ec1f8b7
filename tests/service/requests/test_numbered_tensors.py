"""Numbered tensors are one, joined where they lie or copied, and results are numbered again."""

import pytest
from normserve.codec import safetensors
from normserve.errors import (
    InvalidShapeError,
    MissingTensorError,
    TooLargeError,
    UnexpectedTensorError,
    UnsupportedDtypeError,
)
from normserve.memory.tensors import DType, HostTensor
from normserve.requests.numbered_tensors import TensorSplit, concatenate_tensors

from tests.service.jobs.fake_jobs import tensor


def numbered(name: str, *shapes: tuple[int, ...], dtype: DType = DType.FLOAT32) -> dict[str, HostTensor]:
    """Tensors whose bytes say which they are."""
    made = {}
    for number, shape in enumerate(shapes):
        empty = tensor(*shape, dtype=dtype)
        made[f"{name}.{number}"] = HostTensor(dtype, shape, memoryview(bytes([number + 1]) * empty.nbytes))
    return made


def received(tensors: dict[str, HostTensor]) -> tuple[dict[str, HostTensor], memoryview]:
    """The same as views of a body."""
    body = memoryview(b"".join(safetensors.encode(tensors)))
    return safetensors.decode(body), body


def join(tensors, body=b""):
    copied = []
    whole, several = concatenate_tensors(tensors, memoryview(body), copied.append)
    return whole, several, copied


def test_one_x_stays_as_it_is():
    tensors = {"x": tensor(2, 4), "weight": tensor(4)}
    assert join(tensors) == (tensors, None, [])


@pytest.mark.parametrize("count", [1, 2, 9])
def test_neighbours_in_the_body_are_joined_where_they_lie(count):
    shapes = [(rows % 3, 4) for rows in range(count)]
    sent = numbered("x", *shapes) | numbered("mean", *[shape[:1] for shape in shapes]) | {"weight": tensor(4)}
    whole, several, copied = join(*received(sent))
    assert copied == []
    assert several == TensorSplit(tuple([shape[0] for shape in shapes]))
    assert whole.keys() == {"x", "mean", "weight"}
    assert whole["x"].shape == (sum(several.counts), 4)
    assert bytes(whole["x"].data) == b"".join(bytes(sent[f"x.{n}"].data) for n in range(count))


def test_what_lies_elsewhere_is_copied_and_charged():
    # By their names, as most libraries write them, ten comes before two.
    sent = numbered("x", *[(1, 4)] * 12)
    by_name = {name: sent[name] for name in sorted(sent)}
    whole, _, copied = join(*received(by_name))
    assert copied == [12 * 16]
    assert bytes(whole["x"].data) == b"".join(bytes([n + 1]) * 16 for n in range(12))


def test_a_copy_may_be_refused():
    def refuse(nbytes: int) -> None:
        raise TooLargeError(f"{nbytes} bytes")

    with pytest.raises(TooLargeError, match="32 bytes"):
        concatenate_tensors(numbered("x", (1, 4), (1, 4)), memoryview(b""), refuse)


def test_results_are_numbered_and_sums_over_all_are_not():
    several = TensorSplit((2, 0, 1))
    dx = HostTensor(DType.FLOAT16, (3, 2), memoryview(bytes(range(12))))
    rstd, dweight = tensor(3), tensor(2)
    divided = several.split_results({"dx": dx, "rstd": rstd, "dweight": dweight})
    assert list(divided) == ["dx.0", "dx.1", "dx.2", "rstd.0", "rstd.1", "rstd.2", "dweight"]
    assert [bytes(divided[f"dx.{n}"].data) for n in range(3)] == [bytes(range(8)), b"", bytes(range(8, 12))]
    assert divided["dweight"] is dweight
    described = several.split_specs({"dx": (dx.dtype, dx.shape), "dweight": (dweight.dtype, (2,))})
    assert described == {name: (divided[name].dtype, divided[name].shape) for name in described}


def test_no_rows_at_all():
    whole, several, _ = join(*received(numbered("x", (0, 4), (0, 4))))
    assert whole["x"].shape == (0, 4)
    assert several.split_results({"y": whole["x"]})["y.1"].shape == (0, 4)


def test_an_unknown_name_is_left_to_the_check_of_the_job():
    unknown = {"weights": tensor(4)}
    whole, _, _ = join(numbered("x", (2, 4), (1, 4)) | unknown)
    assert whole["weights"] is unknown["weights"]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x.3": tensor(2, 4)}, MissingTensorError, "x.2 is missing, although x.3 was sent"),
        ({"residual.1": tensor(1, 4)}, MissingTensorError, "residual.0 is missing, although residual.1 was sent"),
        (numbered("residual", (2, 4), (1, 4), (1, 4)), UnexpectedTensorError, "residual.2 was sent without x.2"),
        ({"residual": tensor(3, 4)}, UnexpectedTensorError, "numbered from 0 on, as x.1, got 'residual'"),
        ({"x.01": tensor(2, 4)}, UnexpectedTensorError, "got 'x.01'"),
        ({"x.+1": tensor(2, 4)}, UnexpectedTensorError, "got 'x.\\+1'"),
        ({"x.\u0661": tensor(2, 4)}, UnexpectedTensorError, "numbered from 0 on"),
        ({"x." + "9" * 5000: tensor(2, 4)}, UnexpectedTensorError, "numbered from 0 on"),
        ({"x.1": tensor(1, 5)}, InvalidShapeError, r"x.1 must be \[1, 4\], got \[1, 5\]"),
        ({"x.1": tensor(4)}, InvalidShapeError, "x.1 must have at least two axes"),
        ({"x.1": tensor()}, InvalidShapeError, "x.1 must have at least two axes"),
        (numbered("residual", (2, 4), (2, 4)), InvalidShapeError, r"residual.1 must be \[1, 4\], got \[2, 4\]"),
        ({"x.1": tensor(1, 4, dtype=DType.FLOAT16)}, UnsupportedDtypeError, "x.1 must be float32 as x.0 is"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, error, message):
    with pytest.raises(error, match=message):
        join(numbered("x", (2, 4), (1, 4)) | change)
