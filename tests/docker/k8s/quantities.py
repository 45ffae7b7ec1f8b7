"""Amounts as Kubernetes writes them."""

import re

GIB = 2**30


def nbytes(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([KMG]i)", quantity).groups()
    return int(number) * 2 ** {"Ki": 10, "Mi": 20, "Gi": 30}[unit]
