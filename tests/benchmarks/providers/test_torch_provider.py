import pytest
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


@pytest.mark.parametrize(("groups", "norm"), [(8, "instance_norm"), (4, "group_norm")])
def test_a_group_for_each_channel_is_torch_s_instance_norm(problem, monkeypatch, groups, norm):
    called = []
    for name in ("instance_norm", "group_norm"):
        function = getattr(torch.nn.functional, name)

        def record(*args, name=name, function=function, **options):
            called.append(name)
            return function(*args, **options)

        monkeypatch.setattr(torch.nn.functional, name, record)
    make_eager_run(problem("group_norm", shape=(2, 8, 4, 4), groups=groups)).call()
    assert called == [norm]
