"""Griffe extension: shows the `Example:` sections of docstrings as code on the site."""

import re
import textwrap

import griffe

SECTION = re.compile(r"^(?P<pad> *)Examples?::?\n\n?(?P<code>(?:(?P=pad) +\S.*(?:\n|$)|[ ]*\n)+)", re.MULTILINE)


def fenced(docstring: str) -> str:
    """The docstring with the content of its `Example:` section in a code fence."""

    def fence(match: re.Match) -> str:
        code = textwrap.dedent(match["code"]).strip("\n")
        language = "pycon" if code.startswith(">>>") else "python"
        lines = [f"```{language}", *code.split("\n"), "```"]
        return f"{match['pad']}Example:\n" + textwrap.indent("\n".join(lines), match["pad"] + "    ") + "\n"

    return SECTION.sub(fence, docstring)


class Examples(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
