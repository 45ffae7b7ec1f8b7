"""`python -m fusednorm.host` compiles the host extension; `--status` says how repeated calls are made."""

import argparse

from fusednorm.host.background_build import ensure_extension_built
from fusednorm.launch.call_status import describe_repeated_calls


def main(arguments: list[str] | None = None) -> None:
    """Compile the host extension and print its path.  With --status, compile nothing and print how repeated calls
    are made.
    """
    parser = argparse.ArgumentParser(prog="python -m fusednorm.host", description=__doc__)
    parser.add_argument("--status", action="store_true", help="compile nothing; say how repeated calls are made")
    if parser.parse_args(arguments).status:
        print(describe_repeated_calls())
    else:
        print(ensure_extension_built())


if __name__ == "__main__":
    main()
