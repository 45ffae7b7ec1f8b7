"""The command line: `normserve`, and the pages of documentation that are made from the code."""
