"""Which users may connect, and as whom."""

import os

import pytest
from normserve.errors import ForbiddenError
from normserve.local.peer import Users

OWN = os.geteuid()


def test_the_servers_own_user_is_always_admitted():
    users = Users("")
    assert users.admit(OWN) is None
    assert not users.are_several
    with pytest.raises(ForbiddenError):
        users.admit(OWN + 1)


def test_listed_users_have_their_keys():
    users = Users(f"{OWN + 1},{OWN + 2}=batch")
    assert users.are_several
    assert [users.admit(OWN + number) for number in range(3)] == [None, None, "batch"]
    with pytest.raises(ForbiddenError, match="local-users"):
        users.admit(OWN + 3)


def test_users_without_a_number_here_are_never_admitted():
    with pytest.raises(ForbiddenError):
        Users("65534").admit(65534)
