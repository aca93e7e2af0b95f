"""Citations by authors and year, in docstrings and pages, become links to the entries of references.md."""

import re

NAME = r"[A-Z][a-zé]+(?:-[A-Z][a-zé]+)*"
GAP = r"(?: |\n *)"  # a citation may go on in the next line
AUTHORS = rf"{NAME}(?:{GAP}et{GAP}al\.|{GAP}and{GAP}{NAME})?"
YEAR = r"(?:19|20)\d\d[a-z]?"
# "Titsias (2009)" and "Tebbutt (2016, section 3.2)"; in brackets "(Neal, 2001; Grosse et al., 2015)".
CITATION = re.compile(
    rf"({AUTHORS}){GAP}\(({YEAR})(?:\)|(?=,\s))|(?:(?<=\()|(?<=;\s))({AUTHORS}),{GAP}({YEAR})(?=[,;)])"
)


def key(match):
    """``"Titsias (2009)"``, however it was cited."""
    first, second = match.group(1, 2) if match[1] else match.group(3, 4)
    return f"{' '.join(first.split())} ({second})"


def anchor(entry):
    """The label of an entry, ``"ref-cho-and-saul-2009"``."""
    return "-".join(["ref", *re.findall(r"[a-z0-9]+", entry.lower())])


def link(text, role):
    """``text`` with every citation as a reference, in the markup of ``role``."""
    return CITATION.sub(lambda m: f"{role}`{m[0]} <{anchor(key(m))}>`", text)


def in_docstring(app, what, name, obj, options, lines):
    """Handler of ``autodoc-process-docstring``."""
    lines[:] = link("\n".join(lines), ":ref:").split("\n")


def in_page(app, docname, source):
    """Handler of ``source-read``: everywhere but in code, and in the bibliography itself."""
    if docname != "references":
        parts = re.split(r"(^```.*?^```$|`[^`\n]*`)", source[0], flags=re.DOTALL | re.MULTILINE)
        source[0] = "".join(part if part.startswith("`") else link(part, "{ref}") for part in parts)


def setup(app):
    """Connects the handlers."""
    app.connect("autodoc-process-docstring", in_docstring)
    app.connect("source-read", in_page)
    return {"parallel_read_safe": True}
