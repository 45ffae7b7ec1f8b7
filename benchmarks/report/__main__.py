"""Renders the figures of documents again, after a CSV in `benchmarks/results` or a template has changed.

    python -m benchmarks.report

The text is in `benchmarks/report/templates`: Jinja, with queries of `benchmarks.report.figures` in place of
figures.  `benchmarks.report.documents` lists the documents and defines which part of each is rendered.
"""

from benchmarks.report.documents import DOCUMENTS, ROOT, DocumentRenderer


def main() -> None:
    renderer = DocumentRenderer()
    for name in DOCUMENTS:
        path = ROOT / name
        before = path.read_text(encoding="utf-8")
        after = renderer.render_document(before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(name)


if __name__ == "__main__":
    main()
