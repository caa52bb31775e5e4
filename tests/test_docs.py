"""The documentation: its programs run, its links lead somewhere, its figures are those that their script draws."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FRAGMENTS = {"scale.md"}
"""Pages whose blocks are pieces of programs for machines with several devices."""
sys.path.append(str(ROOT / "examples"))

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"!?\[[^\]\[]*\]\(([^)\s]+)\)")


def _blocks(page: pathlib.Path) -> list[tuple[int, str]]:
    """(line, source) of the Python blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, m.start()) + 1, m[2]) for m in _FENCE.finditer(text) if m[1] == "python"]


def _anchors(page: pathlib.Path) -> set[str]:
    """The anchors of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}


def _path(page: pathlib.Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", [p for p in PAGES if _blocks(p) and p.name not in FRAGMENTS], ids=_path)
def test_programs_run(page, monkeypatch, tmp_path):
    """One after the other in one namespace, as the page says."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for line, source in _blocks(page):
        # Empty lines in front, so that a traceback names the line of the page.
        exec(compile("\n" * line + source, str(page), "exec"), namespace)


def test_tutorials_have_programs():
    tutorials = [p for p in PAGES if p.parent.name == "tutorials"]
    assert len(tutorials) >= 4
    assert all(len(_blocks(p)) >= 4 for p in tutorials)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=_path)
def test_links(page):
    """Of files and headings; what the web has is not looked at."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for link in _LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name} links to {link}"
        assert DOCS in path.parents or page.parent == ROOT, f"{page.name} links out of docs/: {link}"
        if anchor:
            assert anchor in _anchors(path), f"{page.name} links to {link}"


def test_navigation_names_pages_that_exist():
    named = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(named) == len(set(named)) >= 15
    for name in named:
        assert (DOCS / name).is_file(), name


def test_figures_are_up_to_date():
    command = [sys.executable, str(DOCS / "figures" / "draw.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
