"""An MkDocs hook that converts each notebook in `docs/` to a page, including its stored outputs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

__all__ = ["on_files", "on_page_markdown", "page"]

LINK = re.compile(r"\]\((notebooks/\w+)\.ipynb\)")


def page(notebook: dict[str, Any], file_name: str) -> str:
    """Converts a notebook to Markdown, with fenced code and output and embedded images.

    Args:
        notebook: Notebook in format 4.
        file_name: Name of the notebook's file, for a link to it.
    """
    parts, heading = [], "output"
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            heading = (re.findall(r"^#+ (.+)$", source, re.MULTILINE) or [heading])[-1]
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                parts.append(f"![Plot: {heading.lower()}](data:image/png;base64,{''.join(data['image/png']).strip()})")
            elif "text/plain" in data:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    parts.insert(1, f"Download the notebook: [{file_name}]({file_name}).")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by MkDocs with each page's source. Points links to notebooks to their pages."""
    return markdown if page.file.src_uri.startswith("notebooks/") else LINK.sub(r"](\g<1>.md)", markdown)


def on_files(files: Any, config: Any) -> Any:
    """Called by MkDocs with all files of the site."""
    from mkdocs.structure.files import File

    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            content = page(json.loads(Path(file.abs_src_path).read_text()), Path(file.src_uri).name)
            files.append(File.generated(config, file.src_uri.removesuffix(".ipynb") + ".md", content=content))
    return files
