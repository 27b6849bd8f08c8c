"""An MkDocs hook: links to repository files outside the site lead to the repository, or become paths without one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

LINK = r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<path>(?:\.\./){%d}(?!\.\./)[^)#\s]+)(?:#[^)]*)?\)"


def plain(markdown: str, depth: int = 0, repository: str | None = None) -> str:
    """Replaces links out of `docs/` with the path in the repository, in parentheses if the link text differs.

    Args:
        markdown: Source of a page.
        depth: Number of directories between `docs/` and the page.
        repository: Address of the repository. The links then lead to its files.
    """

    def replace(link: re.Match[str]) -> str:
        path, text = link["path"].lstrip("./"), link["text"].strip("`")
        if repository is not None:
            return f"[{link['text']}]({repository.rstrip('/')}/blob/main/{path})"
        same = text.rstrip("/") in (path.rstrip("/"), path.rsplit("/", 1)[-1], path.rsplit("/", 1)[0])
        return f"`{path}`" if same else f"{link['text']} (`{path}`)"

    return re.sub(LINK % (depth + 1), replace, markdown)


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Called by MkDocs with each page's source."""
    return plain(markdown, page.file.src_uri.count("/"), config["repo_url"])


def on_files(files: Any, config: Any) -> Any:
    """Called by MkDocs with all files of the site: adds the changelog."""
    from mkdocs.structure.files import File

    text = (Path(config.config_file_path).parent / "CHANGELOG.md").read_text()
    text = re.sub(r"\]\((?!docs/|https?:)", "](../", text).replace("](docs/", "](")
    files.append(File.generated(config, "changelog.md", content=text))
    return files
