"""Sockets before they are connected."""

import socket

import pytest
from normserve.client.http.socket_opening import make_socket


def option(made, level, name):
    with made:
        return made.getsockopt(level, name)


def test_a_unix_socket_takes_more_at_once_than_the_kernel_lets_it_by_itself():
    plain = option(socket.socket(socket.AF_UNIX), socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert option(make_socket(socket.AF_UNIX), socket.SOL_SOCKET, socket.SO_SNDBUF) > plain


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_tcp_socket_sends_without_delay_and_sizes_its_buffer_itself(family):
    plain = option(socket.socket(family), socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert option(make_socket(family), socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert option(make_socket(family), socket.SOL_SOCKET, socket.SO_SNDBUF) == plain
