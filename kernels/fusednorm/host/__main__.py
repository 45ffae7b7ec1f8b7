"""`python -m fusednorm.host` compiles the host extension and prints its path."""

from fusednorm.host.build import build
from fusednorm.host.load import keep

if __name__ == "__main__":
    print(keep(build()))
