"""No figure of a document differs from the CSV that it rests on."""

import re
import shutil

import pytest

from benchmarks.report import figures
from benchmarks.report.documents import DOCUMENTS, PART, ROOT, TEMPLATES, DocumentRenderer, wrap_markdown
from benchmarks.report.literal_figures import FIGURE, find_exempt_passages, find_figures, find_literal_figures

WITHOUT_A_CSV = {
    # Python's version.
    "README.md": ["3.11"],
}
"""Figures in documents outside of their rendered parts."""

EXEMPT = {"performance.md": ["cb99177"]}
"""Commits of the passages of templates whose figures were taken by hand."""


@pytest.fixture(scope="module")
def renderer():
    return DocumentRenderer()


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def templates():
    return sorted(path.name for path in TEMPLATES.iterdir())


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_has_the_figures_of_its_csvs(renderer, name):
    assert renderer.render_document(text_of(name)) == text_of(name), "python -m benchmarks.report"


def test_each_template_has_its_place():
    parts = [part["template"] for name in DOCUMENTS for part in PART.finditer(text_of(name))]
    assert sorted(parts) == templates()
    assert sum(text_of(name).count("<!-- figures:") for name in DOCUMENTS) == len(parts)


@pytest.mark.parametrize("name", templates())
def test_a_template_has_no_figure_but_by_a_query(name):
    template = (TEMPLATES / name).read_text(encoding="utf-8")
    assert find_literal_figures(template) == []
    assert [commit for _, commit in find_exempt_passages(template)] == EXEMPT.get(name, [])


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_has_no_figure_outside_of_its_parts(name):
    assert find_figures(PART.sub("", text_of(name))) == WITHOUT_A_CSV.get(name, [])


@pytest.mark.parametrize("name", ["docs/patching.md", "benchmarks/results/models.md"])
def test_each_digit_that_is_changed_by_hand_is_found(renderer, name):
    text = text_of(name)
    part = PART.search(text)
    places = [place.start() for place in re.finditer(r"(?<=\.)\d", text) if part.start("text") < place.start()]
    for place in places[:5]:
        changed = f"{text[:place]}{(int(text[place]) + 1) % 10}{text[place + 1 :]}"
        assert renderer.render_document(changed) == text != changed


def test_a_csv_that_is_changed_is_found(renderer, tmp_path, monkeypatch):
    csv = (figures.RESULTS / "models_compile.csv").read_text(encoding="utf-8")
    least = (
        figures.load_rows("models_compile.csv")
        .where(layout="vae_decoder", provider="fusednorm")
        .join_values("ms_p50")
    )
    assert csv.count(least) == 1
    shutil.copytree(figures.RESULTS, tmp_path, dirs_exist_ok=True)
    (tmp_path / "models_compile.csv").write_text(csv.replace(least, f"1{least}"), encoding="utf-8")
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    figures.load_rows.cache_clear()
    try:
        assert renderer.render_document(text_of("docs/patching.md")) != text_of("docs/patching.md")
    finally:
        figures.load_rows.cache_clear()


def test_figures_are_told_from_other_numbers():
    assert find_figures("It takes 0.98 of that, 12 µs, 1.008 to 1.013, and 5 % of 3 to 4 times.") == [
        *("0.98", "12 µs", "1.008", "1.013", "5 %", "3 to 4 times"),
    ]
    assert find_figures("At 1x512 and 2^20 columns of 16 bytes, torch 2.11.0, 30 calls, 64 MiB, adr/0020.") == []
    assert find_figures("`0.98`, [of 0.98](x-0.98.md)\n\n    python -m x 0.98\n\n<!-- 0.98 -->\n") == ["0.98"]


def test_figures_of_templates_are_found_in_text_and_queries():
    assert find_literal_figures("takes {{ times | format_single(2) }} of it, and 0.5 of that") == ["0.5"]
    assert find_literal_figures("takes {{ '0.98' }} or {{ 0.97 }}{{ 1 }}") == ["0.98", "0.97"]
    assert find_literal_figures('{% call by_hand("a", "b") %}0.98{% endcall %} and 0.99') == ["0.99"]
    assert find_exempt_passages('{% call by_hand("a", "b") %}0.98{% endcall %}') == [("a", "b")]
    assert FIGURE.search("1e-9") is None


def test_paragraphs_are_wrapped_and_all_else_stays():
    long = " ".join(["word"] * 40)
    assert max(map(len, wrap_markdown(f"{long}\n{long}").splitlines())) <= 120
    item = wrap_markdown(f"- {long}\n- short\n").splitlines()
    assert item[0].startswith("- word")
    assert item[1].startswith("  word")
    assert item[-1] == "- short"
    for kept in (f"| {long} |", f"# {long}", f"    {long}", f"![{long}](x.png)", f"<!-- {long} -->"):
        assert wrap_markdown(f"a\n{kept}\nb\n") == f"a\n{kept}\nb\n"
