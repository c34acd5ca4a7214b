"""Documentation that cannot rot: links resolve, pages are reachable, generated pages are up to date."""

import re
from pathlib import Path

import pytest

from aserve.cli.docs import REFERENCE, pages
from aserve.server.chat_schema import ChatRequest
from aserve.server.completion_schema import CompletionRequest
from aserve.server.offered import NOT_OFFERED, WITHOUT_EFFECT
from aserve.server.pooling_schema import EmbeddingRequest, RerankRequest, ScoreRequest
from aserve.server.small_routes import SMALL_ROUTES
from aserve.server.text_schema import AbortRequest, DetokenizeRequest, TokenizeRequest
from aserve.server.whole_routes import ABORT, WHOLE_ROUTES

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```", re.DOTALL)


def markdown(root: Path) -> list[Path]:
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]


def links(path: Path) -> list[str]:
    return LINK.findall(CODE.sub("", path.read_text(encoding="utf-8")))


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_resolve(root):
    broken = []
    for page in markdown(root):
        for link in links(page):
            target, _, anchor = link.partition("#")
            if "://" in link or not (path := page.parent / target if target else page):
                continue
            if not path.exists() or (anchor and anchor not in anchors(path)):
                broken.append(f"{page.relative_to(root)}: {link}")
    assert not broken


def test_every_page_is_reachable_from_the_index(root):
    index = root / "docs" / "README.md"
    seen, todo = set(), [index]
    while todo:
        page = todo.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        todo += [(page.parent / link.partition("#")[0]).resolve() for link in links(page) if "://" not in link]
    fragments = set((root / "docs" / "changes").glob("+*.md"))
    assert not [page for page in (root / "docs").rglob("*.md") if page not in seen | fragments]


@pytest.mark.parametrize("name", ["cli.md", "config.md", "errors.md", "metrics.md"])
def test_generated_pages_are_up_to_date(root, name):
    written = (root / REFERENCE / name).read_text(encoding="utf-8")
    assert written == pages()[name], "run: make docs"


def test_every_request_field_and_route_is_documented(root):
    text = (root / REFERENCE / "http-api.md").read_text(encoding="utf-8")
    models = (ChatRequest, CompletionRequest, EmbeddingRequest, ScoreRequest, RerankRequest)
    models += (TokenizeRequest, DetokenizeRequest, AbortRequest)
    names = {name for model in models for name in model.model_fields}
    names |= {*NOT_OFFERED, *WITHOUT_EFFECT, *SMALL_ROUTES}
    assert not sorted(route for route in (*WHOLE_ROUTES, ABORT) if f"`POST {route}`" not in text)
    assert not sorted(name for name in names if f"`{name}`" not in text)


def test_code_in_pages_compiles(root):
    for page in markdown(root):
        for code in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            body = "\n".join("    " + line for line in code.splitlines())
            compile(f"async def page():\n{body}\n", str(page), "exec")


def test_every_decision_says_what_and_why(root):
    for page in sorted((root / "docs" / "decisions").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        assert re.match(r"# \d{4} ", text), page.name
        assert all(part in text for part in ("**Decision.**", "**Why.**")), page.name
