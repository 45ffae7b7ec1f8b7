"""Sanitisation of a server's text for messages: short, printable, and without the API key."""

_UNPRINTABLE = "\N{REPLACEMENT CHARACTER}"


def sanitise_text(text: object, most: int = 1000, api_key: str | None = None) -> str:
    """Make a server's text safe to quote in messages.  It is cut to `most` characters, and unprintable characters
    are replaced.

    Any value but a str becomes "".  Half of a surrogate pair cannot be written to any file, and a control
    character may steer a terminal.

    Args:
        text: any value that a document holds where a text is due.
        most: characters to keep.
        api_key: left out wherever it occurs: a reader of the message must not learn it.
    """
    if not isinstance(text, str):
        return ""
    if api_key:
        text = text.replace(api_key, "[API key]")
    shortened = text if len(text) <= most else text[: most - 1] + "…"
    return (
        shortened
        if shortened.isprintable()
        else "".join(each if each.isprintable() else _UNPRINTABLE for each in shortened)
    )
