"""The documentation site: `make docs` builds it into docs/_build/html, with every warning an error."""

import posixpath
import re
from importlib.metadata import version as version_of
from pathlib import Path

ROOT = Path(__file__).parents[1]

project = "multipod"
author = "The multipod developers"
copyright = f"2026, {author}"
version = release = version_of("multipod")

extensions = ["myst_parser", "sphinx.ext.napoleon", "autoapi.extension", "sphinx_copybutton"]
exclude_patterns = ["_build"]
default_role = "code"
highlight_language = "text"
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"multipod {release}"
html_copy_source = False

# The reference of all public names is read from the source; nothing is imported.
autoapi_dirs = [str(ROOT / "src" / "multipod")]
autoapi_root = "api"
autoapi_options = ["members", "undoc-members", "show-inheritance"]
autoapi_member_order = "bysource"
autoapi_add_toctree_entry = False  # 700 pages in the side bar of 700 pages: ten minutes
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # fields of dataclasses are there twice otherwise: as read, and as the docstring has them
napoleon_custom_sections = [("Source", "notes_style")]
suppress_warnings = ["autoapi.python_import_resolution", "toc.not_included", "ref.python"]

OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]*)(?:#[^)\s]*)?\)")
SPAN = re.compile(r"(`[^`]*`)")
SECTION = re.compile(r"\s*(Attributes|Args|Arguments|Returns|Raises|Yields|Source|Example|Examples|Note|Notes):$")


def keep_links_inside(app, page, source):
    """Links that lead out of docs/, which are right in the repository, become the path of the file there."""
    folder = posixpath.dirname(f"docs/{page}")

    def path_of(link):
        text, target = link.group(1), link.group(2)
        place = posixpath.normpath(posixpath.join(folder, target))
        if place.startswith("docs/"):
            return link.group(0)
        return f"{text} (`{place}`)" if place not in text.replace("`", "") else f"`{place}`"

    source[0] = OUTSIDE.sub(path_of, source[0])


def mark_literal_blocks(app, what, name, obj, options, lines):
    """Indented blocks, tables and Click's paragraphs that keep their lines become literal blocks of docstrings."""
    marked, inside, section, kept = [], False, False, False
    for line in lines:
        if line.strip() == "\b":
            marked, inside, kept = [*marked, "::", ""], True, True
            continue
        before = next((text for text in reversed(marked) if text.strip()), "")
        table, indented = line.startswith("| "), line.startswith("    ")
        section = bool(SECTION.match(line)) or (section and (not line.strip() or line.startswith(" ")))
        kept = kept and bool(line.strip())
        if (table or (indented and not section)) and not inside and (not marked or not marked[-1].strip() or table):
            marked += ["", "::", ""] if table or not before.endswith(":") else ["::", ""]
            inside = True
        elif line.strip() and not table and not indented and not kept:
            if inside and marked[-1].strip():
                marked.append("")
            inside = False
        marked.append(f"    {line}" if table or kept else line if inside else escape(line))
    inline = what in ("attribute", "data", "property")  # napoleon takes what is before a colon there for a type
    lines[:] = ["", *marked] if inline else marked


def escape(line):
    """A line of plain text with backticks, as reStructuredText that says the same."""
    pieces = SPAN.split(line)  # text, span, text, ...
    pieces[::2] = [re.sub(r"([|*_])", r"\\\1", text) for text in pieces[::2]]
    return "".join(
        piece + "\\ " if number % 2 and re.match(r"\w", pieces[number + 1]) else piece
        for number, piece in enumerate(pieces)
    )


def setup(app):
    """Called by Sphinx."""
    app.connect("source-read", keep_links_inside)
    app.connect("autodoc-process-docstring", mark_literal_blocks, priority=400)  # before napoleon reads the sections
