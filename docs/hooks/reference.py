"""Pages below reference/, made from the code while the site is built, so that they cannot rot."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import commands
import errors
import interfaces
import python_api
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

PAGES = {
    "commands": commands.commands_page,
    "configuration": commands.configuration_page,
    "python": python_api.python_page,
    "http": interfaces.http_page,
    "grpc": interfaces.grpc_page,
    "errors": errors.errors_page,
    "wire": errors.wire_page,
}
ROOT = Path(__file__).resolve().parents[2]
#: The folders as the package that they are installed as; gone when the process ends.
_TREE = tempfile.TemporaryDirectory(prefix="kvstrata-docs-")


@event_priority(100)
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Show mkdocstrings, which reads source, a tree in which ``client/`` is ``kvstrata/client/``."""
    package = Path(_TREE.name) / "kvstrata"
    package.mkdir(exist_ok=True)
    for folder in python_api.FOLDERS:
        link = package / folder
        if not link.exists():
            link.symlink_to(ROOT / folder, target_is_directory=True)
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [_TREE.name]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put the generated pages beside those in files."""
    for name, make in PAGES.items():
        files.append(File.generated(config, f"reference/{name}.md", content=make()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to files of the repository outside docs/ become their names: the site does not hold them."""

    def named(link: re.Match[str]) -> str:
        text, path = link.groups()
        if not (ROOT / path).exists():
            return link[0]
        return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"

    return re.sub(r"\[([^\]]+)\]\(\.\./([^)#]+)\)", named, markdown) if "/" not in page.file.src_uri else markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mend what mkdocstrings makes of our docstrings."""
    return python_api.without_roles(html) if page.file.src_uri == "reference/python.md" else html
