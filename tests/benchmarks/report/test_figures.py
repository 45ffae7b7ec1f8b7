"""No figure of a document differs from the CSV that it rests on."""

import re
import shutil

import pytest

from benchmarks.report import figures
from benchmarks.report.documents import (
    DOCUMENTS,
    PART,
    ROOT,
    TEMPLATES,
    DocumentRenderer,
    name_torch,
    wrap_markdown,
)
from benchmarks.report.literal_figures import FIGURE, find_exempt_passages, find_figures, find_literal_figures

PROSE = (
    *DOCUMENTS,
    "docs/deploying/README.md",
    "docs/deploying/containers.md",
    "docs/deploying/kubernetes.md",
    "docs/deploying/upgrading.md",
    "docs/numerics.md",
)
"""The documents whose figures are checked.  Those of a decision are of the time of the decision, and stay."""

WITHOUT_A_CSV = {
    # Versions of Python, Kubernetes, TLS, torch, Triton and CUDA, and a compute capability.
    "README.md": ["3.11", "3.12"],
    "docs/deploying/images.md": ["9.0"],
    "docs/deploying/tls-and-keys.md": ["1.2", "1.3"],
    "docs/jax.md": ["3.12"],
    "docs/patching.md": ["3.11"],
    # Settings, and what follows from them.
    "docs/client.md": ["0.75", "1.5", "30 s", "60 s"],
    "docs/deploying/README.md": ["5 s"],
    "docs/deploying/containers.md": ["30 s"],
    "docs/deploying/front-ends.md": ["0.2"],
    "docs/deploying/kubernetes.md": ["1.30", "5 s", "4.2"],
    "docs/deploying/sizing.md": ["0.4", "0.5", "1.25"],
    "docs/load-testing.md": [
        *("60 %", "30 s", "25 %", "200 %", "10 %", "115 %", "55 s", "50 %", "300 %", "28 s", "24 s", "40 %", "3 s"),
        *("50 times", "1 %", "80 %", "20 %", "90 %", "95 %", "99 %", "5 %", "0.1"),
    ],
    # Bounds of errors; versions.
    "docs/numerics.md": ["0.006", "20 times", "2.11", "3.6", "13.0"],
}
"""Figures in documents outside of their rendered parts, each once."""

EXEMPT = {
    "front_ends.md": ["86ecd7d"],
    "images.md": ["d123c49", "d123c49"],
    "load.md": ["7d56546"],
    "performance.md": ["cb99177"],
    "ray.md": ["eef4130"],
    "sizing.md": ["8f40bb7", "0677428"],
}
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


@pytest.mark.parametrize("name", PROSE)
def test_a_document_has_no_figure_outside_of_its_parts(name):
    assert list(dict.fromkeys(find_figures(PART.sub("", text_of(name))))) == WITHOUT_A_CSV.get(name, [])


@pytest.mark.parametrize("name", ["docs/patching.md", "benchmarks/results/models.md"])
def test_each_digit_that_is_changed_by_hand_is_found(renderer, name):
    text = text_of(name)
    part = PART.search(text)
    places = [place.start() for place in re.finditer(r"(?<=\.)\d", text) if part.start("text") < place.start()]
    for place in places[:5]:
        changed = f"{text[:place]}{(int(text[place]) + 1) % 10}{text[place + 1 :]}"
        assert renderer.render_document(changed) == text != changed


@pytest.mark.parametrize(
    "name",
    sorted(
        {*DOCUMENTS, "CONTRIBUTING.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))}
    ),
)
def test_what_a_document_names_as_its_source_exists(name):
    text = text_of(name)
    for csv in set(re.findall(r"`(?:benchmarks/results/)?([a-z][\w-]*\.csv)`", text)):
        assert (figures.RESULTS / csv).is_file(), csv
    for module in set(re.findall(r"python -m\s(benchmarks(?:\.\w+)*)", text)):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module


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


def test_torch_is_named_without_its_build(monkeypatch):
    rows = tuple({"torch": version} for version in ("2.11.0+cu130", "2.11.0+cpu", "2.13.0"))
    monkeypatch.setattr(figures, "load_rows", lambda *names: figures.CsvRows(" ".join(names), rows))
    assert name_torch("a.csv", "b.csv") == "torch 2.11.0 and 2.13.0"
