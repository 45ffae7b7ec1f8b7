"""`python -m fusednorm.host` compiles the host extension and prints its path."""

from fusednorm.host.background import ensure_built

if __name__ == "__main__":
    print(ensure_built())
