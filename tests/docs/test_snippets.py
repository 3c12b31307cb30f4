"""Every Python block of the README and the docs runs, in the order in which a reader meets it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("README.md"), *ROOT.glob("docs/*.md")])
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _blocks(page: Path) -> list[tuple[int, str]]:
    """List a page's Python blocks with the number of lines before each."""
    text = page.read_text()
    return [(text.count("\n", 0, m.start(1)), m.group(1)) for m in _BLOCK.finditer(text)]


def test_the_readme_has_blocks_to_run() -> None:
    assert ROOT / "README.md" in PAGES
    assert _blocks(ROOT / "README.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_python_block_escapes(page: Path) -> None:
    fences = re.findall(r"^[ \t]*```+[ \t]*py.*$", page.read_text(), re.MULTILINE)
    assert ["```python"] * len(_blocks(page)) == fences


@pytest.mark.parametrize(
    "page", [page for page in PAGES if _blocks(page)], ids=lambda page: page.name
)
def test_the_blocks_of_a_page_run_in_order(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "".join(block for _, block in _blocks(page))
    if "DATABASE_URL" in text:
        monkeypatch.setenv("DATABASE_URL", request.getfixturevalue("empty_postgres_url"))
    if "REDIS_URL" in text:
        monkeypatch.setenv("REDIS_URL", request.getfixturevalue("redis_url"))
    namespace: dict[str, object] = {"__name__": "__main__"}
    for lines_before, block in _blocks(page):
        # Padded, so that a traceback names the line of the page. This file's own future imports
        # are not the reader's.
        code = compile("\n" * lines_before + block, str(page), "exec", dont_inherit=True)
        exec(code, namespace)
