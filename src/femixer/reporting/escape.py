"""Text as it must be written so that Markdown, LaTeX, HTML and a spreadsheet show it as it is."""

from __future__ import annotations

import html
import re

from femixer.reporting.scores import number


def one_line(text: str) -> str:
    """Line breaks, tabs and other control characters as single spaces."""
    return " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f]", " ", text).split())


_INLINE = re.compile(
    r"""[\\`*|~$]                    # always of meaning
      | (?<![^\W_])_ | _(?![^\W_])   # an underscore inside a word is none
      | <(?=[A-Za-z/!?])             # would open a tag
      | &(?=\#|[A-Za-z])             # would be a character
      | (?<=\])[(\[:] | (?<=!)\[     # would make a link, an image or a definition
    """,
    re.VERBOSE,
)


def in_markdown(text: str) -> str:
    """Inside a cell or a sentence."""
    return _INLINE.sub(r"\\\g<0>", one_line(text))


def paragraph(text: str) -> str:
    """A Markdown paragraph of its own: not a heading, a list, a quote, a line or a definition."""
    inline = in_markdown(text)
    numbered = re.match(r"\d+(?=[.)])", inline)
    if numbered:
        return f"{numbered[0]}\\{inline[numbered.end() :]}"
    return f"\\{inline}" if inline[:1] in {*"#+-=>"} else inline


_LATEX = {character: f"\\{character}" for character in "&%$#_{}"}
_LATEX |= {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    # After a line break of a table these two would belong to it.
    "[": "{[}",
    "*": "{*}",
}
_LATEX |= {"–": "--", "—": "---", "…": r"\ldots{}"}
_SIGNS = {"±": "pm", "≤": "le", "≥": "ge", "×": "times", "µ": "mu", "μ": "mu", "↑": "uparrow", "↓": "downarrow"}
_LATEX |= {sign: rf"$\{name}$" for sign, name in _SIGNS.items()}


def in_latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in one_line(text))


def in_html(text: str) -> str:
    return html.escape(one_line(text))


_FORMULA = {*"=+-@", *"\uff1d\uff0b\uff0d\uff20"}  # also as wide characters, which some spreadsheets take for these


def in_csv(text: str) -> str:
    """A spreadsheet would run text that begins like a formula; an apostrophe in front makes it text."""
    line = one_line(text)
    return f"'{line}" if line[:1] in _FORMULA and number(line) is None else line
