import inspect

from normserve import client
from normserve.client import errors


def test_every_error_is_public_and_drawn_in_the_tree():
    tree = {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.ClientError)
    }
    assert tree.keys() <= set(client.__all__)
    for name in tree:
        assert name in errors.__doc__


def test_the_public_names_are_pinned():
    assert set(client.__all__) - set(dir(errors)) == {
        "DEFAULT_URL",
        "AsyncClient",
        "AsyncSocketTransport",
        "BackwardResult",
        "Client",
        "DType",
        "ForwardResult",
        "HostTensor",
        "RetryPolicy",
        "SocketTransport",
        "Timing",
    }
