"""Sphinx on this project's terms: the reference from docstrings, links to it, search by section, formulas as MathML."""

import html
import inspect
import operator
import re
from xml.etree import ElementTree

from docutils import nodes
from docutils.utils import new_document
from docutils.utils.math import MathError, latex2mathml
from public_names import LISTED, find_module, listed_names, names_in_reference
from sphinx import search
from sphinx.addnodes import desc, desc_parameter, desc_sig_name, pending_xref
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

logger = logging.getLogger(__name__)

# ---------------------------------------------------------------- pages of the reference


def directive_of(x):
    """The directive of autodoc that documents a public object."""
    if inspect.isclass(x):
        return "autoclass", "   :members:\n"
    return ("autofunction" if callable(x) else "autodata"), ""


def write_entries(match):
    """A table of the names that a `reference` lists, then the entry of each."""
    path = match[1]
    names = [name for _, name in listed_names(match[0])]
    lines = [f"```{{eval-rst}}\n.. currentmodule:: {path}\n\n.. autosummary::\n   :nosignatures:\n"]
    lines += [f"   {name}" for name in names]
    for name in names:
        directive, options = directive_of(getattr(find_module(path), name))
        lines.append(f"\n.. {directive}:: {path}.{name}\n{options}")
    return "\n".join(lines) + "\n```"


def read_page(app, docname, source):
    app.env.current_document["modules"] = tuple({path: None for path, _ in listed_names(source[0])})
    source[0] = re.sub(r"\n\n```$", "\n```", source[0], flags=re.MULTILINE)  # doctests end with an empty line
    source[0] = LISTED.sub(write_entries, source[0])


def number_notebook(app, doctree):
    """Texts and lecturers call a notebook by its number."""
    docname = app.env.docname
    number = docname.removeprefix("notebooks/")[:2]
    if number.isdigit():
        for title in (app.env.titles[docname], app.env.tocs[docname].next_node(nodes.reference)):
            title.insert(0, nodes.Text(f"{number} "))


# ---------------------------------------------------------------- docstrings


def as_rst(app, label, name, x, options, lines):
    """Docstrings have backquotes and indented drawings as in Markdown; the rest of them is reStructuredText."""
    text = "\n".join(lines)
    text = re.sub(r"(?<!`)`([^`\n][^`]*)`(?!`)", lambda m: "``" + " ".join(m[1].split()) + "``", text)
    text = re.sub(r"(\w``)(?=\w)", r"\1\\ ", text)
    text = "\n\n".join(map(link_errors, text.split("\n\n")))
    text = re.sub(r"``.*?``|(?<=[(\[\s])\*+(?=\w+[,)\]])", escape, text)
    text = re.sub(r"\n\n(?=    \S)", "\n\n::\n\n", text)
    lines[:] = text.split("\n")


def escape(match):
    """Escape stars that are no emphasis, as in f(*args), outside of code."""
    return match[0].replace("*", r"\*") if match[0].startswith("*") else match[0]


def link_errors(paragraph):
    """Make the public errors that a text names code, which becomes links; examples stay as they are."""
    return paragraph if ">>>" in paragraph else ERRORS.sub(r"``\1``", paragraph)


def leave_out_any(app, label, name, x, options, signature, returns):
    """An annotation that says nothing only takes room."""
    signature = signature and re.sub(r": (~typing\.)?Any( \| None)?(?=\)|,| =)", "", signature)
    return signature, None if returns in ("Any", "~typing.Any") else returns


def skip(app, label, name, x, skipped, options):
    """The fields of a named tuple are in its signature."""
    return True if (inspect.getdoc(x) or "").startswith("Alias for field number") else None


#: Instead of a module: it has no source, so an entry has no link to it.
NO_SOURCE = "builtins"


def forget_no_source(app):
    """Leave the module that stands for no source out of the index of modules, which would link to a page of it."""
    getattr(app.env, "_viewcode_modules", {}).pop(NO_SOURCE, None)
    return []


def find_source(app, path, name):
    """The module whose source has a public function, which a module that exports it has wrapped.

    A source links back to one entry of a function. That is the one of its own module, if the reference has that.
    """
    x = operator.attrgetter(name)(find_module(path))
    home = inspect.unwrap(x).__module__ if inspect.isfunction(x) else None
    return NO_SOURCE if path != home and (home, name) in TARGETS else home


# ---------------------------------------------------------------- links

#: The modules whose names texts use without the module's, the first first.
HOMES = ("collectives", "minidiff", "spmd")
#: Pages about the names of one module.
ABOUT = {"docs/guide/parallel": ["spmd.parallel"], "docs/guide/training": ["minidiff.optim"]}
TARGETS = names_in_reference()
MODULES = {module for module, _ in TARGETS}
NAMED = "|".join(sorted(name for _, name in TARGETS if name.endswith(("Error", "Warning"))))
ERRORS = re.compile(rf"(?<![\w.`])({NAMED})\b(?!`)")


def find_target(name, homes):
    """The full path of what a name in a text means, or None if it is not public."""
    full = re.sub(r"^md\b", "minidiff", name)
    path, _, last = full.rpartition(".")
    if path and full in MODULES:
        return full
    if path:
        homes = [path]
    elif "_" in name:  # no variable of an example
        homes = [*homes, *sorted(module for module, other in TARGETS if other == name)]
    return next((f"{home}.{last}" for home in homes if (home, last) in TARGETS), None)


def find_targets(text, homes):
    """Pairs of a piece of a code, and its target or None: of a name, a call, or a list of names of one module."""
    words = re.split(r"(\s+)", text)
    if not all(re.fullmatch(r"[\w.]+|\s+", word) for word in words):
        name = re.match(r"((?!\w+=(?!=))[\w.]+)?", text)[0]  # none for an argument, as in axis=0
        return [(name, find_target(name, homes)), (text[len(name) :], None)]
    names = words[::2]
    if len(names) > 1:
        last = {name.rpartition(".")[2] for name in names}
        local = [module for module in sorted({m for m, _ in TARGETS}) if last <= {n for m, n in TARGETS if m == module}]
        homes = [*local, *homes]
    return [(word, find_target(word, homes)) for word in words]


def parameters_around(node):
    """The parameters of the entry of the reference that a node is in, which may be called as something public is."""
    while not isinstance(node, desc):
        if (node := node.parent) is None:
            return set()
    names = [parameter.next_node(desc_sig_name) for parameter in node[0].findall(desc_parameter)]
    return {name.astext() for name in names if name is not None}  # a star alone has no name


class LinkNames(SphinxTransform):
    """Make code in a text that is a public name, or a list of public names, a link to the reference."""

    default_priority = 400

    def apply(self):
        about = ABOUT.get(self.env.docname) or self.env.current_document.get("modules", ())
        homes = (*about, *HOMES)
        for node in list(self.document.findall(nodes.literal)):
            if isinstance(node.parent, (nodes.title, nodes.reference, pending_xref)):
                continue
            local = parameters_around(node)
            pieces = [(text, None if text in local else target) for text, target in find_targets(node.astext(), homes)]
            if any(target for _, target in pieces):
                node.children = []
                node += [self.link(text, target) if target else nodes.Text(text) for text, target in pieces if text]

    def link(self, text, target):
        options = {"refdomain": "py", "reftype": "obj", "reftarget": target, "refexplicit": True, "refwarn": True}
        return pending_xref(text, nodes.inline(text, text), refdoc=self.env.docname, **options)


# ---------------------------------------------------------------- search


class SectionIndex(search.IndexBuilder):
    """An index of sections and of entries of the reference: a hit opens the page there, not at its top.

    What it calls a document is "page" or "page#anchor", which `static/scorer.js` reads.
    """

    def feed(self, docname, filename, title, doctree):
        titles = self._word_collector(doctree).titles
        for node in [doctree, *doctree.findall(is_indexed)]:
            name, heading = place_of(node, docname, title)
            piece = new_document(docname)
            piece.extend(child.deepcopy() for child in node.children if not is_indexed(child))
            super().feed(name, filename, heading, piece)
            self._all_titles[name] = []
        self._all_titles[docname] = titles

    def prune(self, docnames):
        super().prune({name for name in self._titles if name.partition("#")[0] in docnames})


def is_indexed(node):
    """Whether a node is a section, or an entry of the reference that is not in another."""
    return isinstance(node, nodes.section) or (isinstance(node, desc) and isinstance(node.parent, nodes.section))


def place_of(node, docname, title):
    """Return a node's name in the index, and the title that search shows."""
    if isinstance(node, desc):
        return f"{docname}#{node[0]['ids'][0]}", node[0]["ids"][0]
    if isinstance(node.parent, nodes.section):
        return f"{docname}#{node['ids'][0]}", f"{title} > {node[0].astext()}"
    return docname, title


# ---------------------------------------------------------------- formulas

#: LaTeX that docutils does not know, and what it knows instead.
LATEX = {
    r"(\\(?:dot|bar) ?\w)(?=_)": r"\1{}",
    r"\\(ln|log|exp|sin|cos|tanh)(?= [a-z])": r"\\\1\\,",
    r"\\dots\b": r"\\ldots",
    r"\\mathrel\b": "",
    r"\\frac(\d)(\d)": r"\\frac{\1}{\2}",
    r"(?<=[A-Za-z}])('+)(?![A-Za-z])": lambda m: r"^{" + r"\prime" * len(m[1]) + "}",
}
MATHML = "http://www.w3.org/1998/Math/MathML"
ElementTree.register_namespace("", MATHML)
#: Braces under and over a term; what docutils makes a subscript or superscript of them is their label.
BRACES = {"\u23df": ("msub", "munder"), "\u23de": ("msup", "mover")}


def write_math(writer, node, as_block=False):
    """Write MathML, which browsers show without a script from elsewhere, in a font of the site's own."""
    text = node.astext()
    for unknown, known in LATEX.items():
        text = re.sub(unknown, known, text)
    try:
        written = latex2mathml.tex2mathml(text, as_block)
    except MathError as error:
        logger.warning("no MathML for %s: %s", text, error, location=node)
        raise nodes.SkipNode from error
    formula = ElementTree.fromstring(re.sub(r"&[A-Za-z]{5,};|&nbsp;", lambda m: html.unescape(m[0]), written))
    center_labels(formula)
    if as_block:
        formula.set("style", f"--characters: {width_of(formula)}")
    writer.body.append(ElementTree.tostring(formula, encoding="unicode"))
    raise nodes.SkipNode


def center_labels(formula):
    """Put the labels of braces below or above these: docutils makes them subscripts and superscripts."""
    for script in formula.iter():
        brace = script[0][-1].text if len(script) == 2 and len(script[0]) == 2 else None
        before, after = BRACES.get(brace, (None, None))
        if script.tag == f"{{{MATHML}}}{before}":
            script.tag = f"{{{MATHML}}}{after}"


def width_of(formula):
    """Return about how many characters a formula is wide, by which the style sheet shrinks it on a narrow screen."""
    name = formula.tag.removeprefix(f"{{{MATHML}}}")
    widths = [width_of(child) for child in formula] or [len((formula.text or "").strip())]
    if name in ("mfrac", "munder", "mover", "munderover", "mtable", "msubsup"):
        return max(widths)
    return sum(widths) + (name == "mo")


def write_math_block(writer, node):
    write_math(writer, node, as_block=True)


def setup(app):
    app.connect("source-read", read_page)
    app.connect("doctree-read", number_notebook, priority=900)
    app.connect("autodoc-process-docstring", as_rst)
    app.connect("autodoc-process-signature", leave_out_any)
    app.connect("autodoc-skip-member", skip)
    app.connect("viewcode-follow-imported", find_source)
    app.connect("html-collect-pages", forget_no_source, priority=400)  # before that index is made
    app.add_transform(LinkNames)
    search.IndexBuilder = SectionIndex  # the builder imports it when it begins to write; there is no option for it
    app.add_html_math_renderer("mathml", (write_math, None), (write_math_block, None))
    return {"parallel_read_safe": True}
