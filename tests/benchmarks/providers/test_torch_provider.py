import torch

from benchmarks.providers.torch_provider import make_copy_run, make_eager_run


def test_the_backward_pass_of_torch_can_be_repeated(problem):
    run = make_eager_run(problem(pass_="backward"))
    first, again = run.call(), run.call()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_the_copy_is_of_x(problem):
    it = problem()
    (copied,) = make_copy_run(it).call()
    assert torch.equal(copied, it.x)
    assert copied.data_ptr() != it.x.data_ptr()
