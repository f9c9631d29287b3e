r"""Pairs of an answer and a ground truth with what a mathematician says of them.

`docs/own_reward.md` shows this table; a test checks that the page is current, and
`python -m tests.reward.matching.answer_table` prints what belongs there.
"""

# ruff: noqa: E501, RUF001  rows of a table, with the characters that models write

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True)
class Kind:
    """A kind of answers: pairs that are equal, and pairs that differ."""

    title: str
    equal: tuple[tuple[str, str], ...]
    different: tuple[tuple[str, str], ...]
    unrecognized: tuple[tuple[str, str], ...] = ()
    """Pairs that are equal, but that the matcher does not accept."""


TABLE = (
    Kind(
        "letters and choices",
        (("A", "A"), ("(A)", "A"), ("b.", "B"), (r"\text{(C)}", "C"), ("**D**", "D"), ("x", "$x$")),
        (("A", "B"), ("x", "y"), ("n", "N"), ("A", "Apple"), ("AB", "A"), ("x", "-x")),
    ),
    Kind(
        "words",
        (
            (r"\text{yes}", "yes"), ("Paris.", "paris"), ("The U.S.A.", "usa"), ("`None`", "none"),
            ("“no solution”", "No solution"), (r"\textbf{Monday}", "monday"),
            ("the Beatles", "Beatles"),
        ),
        (
            ("yes", "no"), ("Paris", "London"), ("not prime", "prime"), ("at 12:30", "at 1230"),
            ("no", "none"), ("Vitamin B12", "Vitamin B6"),
        ),
    ),
    Kind(
        "operators and signs",
        (("+", "+"), (r"\times", "*"), ("≤", r"\leq"), ("<", "<"), ("-", "−")),
        (("+", "-"), ("<", ">"), ("<", "<="), ("-x", "x"), ("+", "")),
    ),
    Kind(
        "integers",
        (
            ("42", "42.0"), ("1,000", "1000"), (r"12\,000", "12000"), ("1 000 000", "1000000"),
            ("1{,}234", "1234"), ("+7", "7"), ("-0", "0"), ("−5", "-5"), ("٣", "3"), ("４２", "42"),
            ("007", "7"), (r"\boxed{8}", "8"), ("{7}", "7"), ("(5)", "5"),
        ),
        (
            ("-5", "5"), ("1,2", "12"), ("1000001", "1000000"), ("12", "21"),
            ("123456789012345", "123456789012346"), ("1e400", "1e401"), ("7 8 9", "789"),
            ("9" * 60, "9" * 61), ("1,00", "100"),
        ),
    ),
    Kind(
        "decimals",
        (
            ("0.50", "0.5"), (".5", "0.5"), ("5.", "5"), ("1e3", "1000"), ("1.5E-3", "0.0015"),
            (r"3.2\times 10^{5}", "320000"), ("6.02·10²³", "6.02e23"), (r"0.\overline{3}", "1/3"),
            (r"0.1\overline{6}", r"\frac16"), ("10^{-3}", "0.001"), ("1e10000", "10e9999"),
        ),
        (
            ("3.14", "314"), ("3.0000001", "3"), ("1000000.1", "1000000.2"), ("0.333333", "1/3"),
            ("3,5", "3.5"), ("1e-400", "0"), (r"0.\overline{9}", "0.9"), ("1e999999999", "1e999999998"),
        ),
    ),
    Kind(
        "fractions and mixed numbers",
        (
            ("0.5", "1/2"), (r"\dfrac12", "1/2"), (r"\frac{-1}{2}", r"-\frac{1}{2}"),
            ("3 1/2", "3.5"), (r"3\frac{1}{2}", "7/2"), ("3½", "3.5"), ("-2 1/4", "-2.25"),
            ("½", r"\tfrac{1}{2}"), ("2/4", "1/2"), (r"\left(\frac{2}{4}\right)", "$0.5$"),
            ("1-1/2", "0.5"),
        ),
        (
            ("1/2", "1/3"), ("31/2", "3 1/2"), ("1/3", "0.33"), ("1/0", "10"), ("1/0", "5/0"),
            (r"2\frac{1}{2}", "1"), ("1/2", "2/1"), ("12", "1/2"),
        ),
    ),
    Kind(
        "percent",
        (("50%", "0.5"), (r"50\%", "50"), ("50 percent", "1/2"), ("12.5%", r"\frac18"), ("0%", "0")),
        (("5%", "50"), ("50%", "5%"), ("50%", "0.05"), ("50%", "$50"), ("100%", "0.1")),
    ),
    Kind(
        "units and money",
        (
            ("90°", "90"), (r"90^\circ", "90 degrees"), ("$5", "5"), (r"\$1,000.50", "1000.5"),
            ("5 dollars", "$5"), (r"5\text{ cm}", "5"), ("5 km", "5000 m"), ("12 square feet", "12 ft^2"),
            (r"12\,\mathrm{cm}^2", "12cm²"), ("60 miles per hour", "60 mi/h"), ("90 min", "1.5 hours"),
            ("3 million", "3,000,000"), ("$2.5 billion", "2500000000"), ("2 dozen", "24"),
            (r"5\sqrt{2}\text{ cm}", r"5\sqrt{2}"), (r"60\pi\text{ cm}^2", r"60\pi"), ("75 cents", "$0.75"),
        ),
        (
            ("5 cm", "5 m"), ("5 cm", "5 cm^2"), ("$5", "€5"), ("5 million", "5"), ("5m", "5"),
            ("5 kg", "5 km"), ("5 apples", "5 oranges"), ("5 am", "5 pm"), ("30 °C", "30 °F"),
            (r"5\sqrt{2}\text{ cm}", r"5\sqrt{2}\text{ km}"), ("5x", "5"), ("5th", "5 m"),
        ),
        (("12 apples", "12"), (r"180^\circ", r"\pi")),
    ),
    Kind(
        "dates, times, scores",
        (("2024-05-03", "2024-05-03"), ("12:30", "12:30"), ("3:2", "3 : 2"), ("3-2", "3-2")),
        (
            ("12:30", "1230"), ("2024-05-03", "2016"), ("3-2", "1"), ("3:2", "32"), ("3-2", "2-3"),
            ("10-20", "-10"), ("12:30", "12.30"),
        ),
    ),
    Kind(
        "tuples and lists",
        (
            ("(1,2)", "(1, 2)"), (r"\left( 1, 2 \right)", "(1,2)"), (r"(\frac{1}{2}, 3)", "(0.5, 3)"),
            (r"\left(\frac{\sqrt2}{2},1\right)", r"(1/\sqrt{2}, 1)"), ("1,2", "1, 2"), ("[1, 2.0]", "[1,2]"),
            ("x=1, y=2", "y=2,x=1"), ("(x,y)=(1,2)", "(1,2)"), (r"\langle 1,2\rangle", "⟨1, 2⟩"),
            ("((1,2),(3,4))", "((1, 2), (3, 4))"),
        ),
        (
            ("(1,2)", "(2,1)"), ("(1,2)", "12"), ("(1,2)", "(1,2,3)"), ("1,2", "1.2"), ("(1,2)", "[1,2]"),
            ("x=1, y=2", "x=2, y=1"), ("(1,2),(3,4)", "(1,2,3,4)"), ("1,2,3,...", "1,2,3"), ("(0,1)", "1"),
        ),
    ),
    Kind(
        "sets and alternatives",
        (
            (r"\{1,2\}", r"\{2,1\}"), ("{1, 2}", r"\{1,2\}"), (r"\{1,2,2\}", r"\{1,2\}"), (r"\emptyset", r"\{\}"),
            ("1 or 2", "2 or 1"), ("x=1 or x=2", "x=2 or x=1"), (r"\pm 2", r"\{-2, 2\}"), ("±2", "2, -2"),
            (r"1\pm\sqrt{2}", r"1-\sqrt2, 1+\sqrt2"), ("∅", r"\varnothing"), (r"\{x+1, 2\}", r"\{2, 1+x\}"),
        ),
        (
            (r"\{1,2\}", r"\{1,3\}"), (r"\{1,2\}", "(1,2)"), (r"\{1\}", r"\{1,2\}"), (r"\pm 2", "2"),
            ("1 or 2", "1"), (r"\emptyset", "0"), (r"\{0\}", r"\emptyset"),
        ),
    ),
    Kind(
        "intervals",
        (
            ("[1,2)", "[1, 2)"), (r"(-\infty, 2]", "(-∞,2]"), ("x≥2", r"[2,\infty)"), ("1<x<=3", "(1,3]"),
            (r"x\in[0,1]", "[0,1]"), (r"(0,1)\cup(2,3)", "(2,3) ∪ (0,1)"), ("[0.5,1]", r"[\frac12,1]"),
            ("x<2", r"(-\infty,2)"), (r"(-\infty,1)\cup(2,\infty)", "x>2 or x<1"),
        ),
        (
            ("[1,2)", "(1,2)"), ("[1,2]", "[1,2)"), (r"(-\infty,2)", r"(2,\infty)"), ("x>2", r"[2,\infty)"),
            (r"(0,1)\cup(2,3)", "(0,3)"), (r"(-\infty,1)\cup(2,\infty)", "x>1 or x<2"), (r"(0,1)\cap(2,3)", r"(0,1)\cup(2,3)"), (r"\infty", r"-\infty"),
        ),
    ),
    Kind(
        "equations and inequalities",
        (
            ("x=5", "5"), ("5", "x = 5"), ("f(x)=2x", "2x"), (r"\theta=30°", "30"), ("x<2", "2>x"),
            (r"x \le 2", "x<=2"), ("y=2x+1", "y=1+2x"), ("y=2x+1", "2x-y+1=0"), ("x≠3", r"x\ne 3"),
            ("1<x<2", "2>x>1"),
        ),
        (
            ("x<2", "x>2"), ("x<2", "x<=2"), ("x=5", "y=5"), ("x=5", "x=6"), ("x!=3", "x=3"),
            ("y=2x", "y=3x"), ("x<2", "2"), ("x=5", "x=-5"), ("x+y=5", "5"), ("a<b", "b<a"),
        ),
        (("x+2y=4", "2x+4y=8"), ("2x<4", "x<2")),
    ),
    Kind(
        "matrices",
        (
            (
                r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
                r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}",
            ),
            (r"\begin{pmatrix}\frac12\\1\end{pmatrix}", r"\begin{pmatrix}0.5\\1\end{pmatrix}"),
        ),
        (
            (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
            (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
            (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        ),
    ),
    Kind(
        "expressions",
        (
            ("x+1", "1+x"), ("2(x+1)", "2x+2"), (r"\frac{x}{2}", "0.5x"), ("x²-1", "(x-1)(x+1)"), ("2*3", "6"),
            ("5!", "120"), ("2^{10}", "1024"), (r"\sqrt{16}", "4"), (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt 2}{2}"),
            ("sqrt(3)/2", r"\frac{\sqrt{3}}{2}"), (r"\sin^2 x+\cos^2 x", "1"), (r"\log_2 8", "3"),
            (r"\binom{5}{2}", "10"), ("2π", r"2\pi"), (r"\frac{\pi}{2}", "pi/2"), (r"2^{n+1}", r"2\cdot 2^n"),
            ("3+4i", "4i+3"), ("i^2", "-1"), ("-(-x)", "x"), ("|x-1|", "|1-x|"), (r"\sqrt[3]{8}", "2"),
            (r"e^{\ln 2}", "2"), ("α+1", r"1+\alpha"), ("x_1+x_2", "x_2 + x_1"), ("n(n+1)/2", r"\frac{n^2+n}{2}"),
        ),
        (
            ("5!", "5"), ("x^2", "x2"), ("x+1", "x-1"), ("N+1", "n+1"), (r"\sqrt{x^2}", "x"), ("0.333x", "x/3"),
            ("2x", "x^2"), (r"\sqrt{2}", "1.41421356"), (r"\pi", "3.14159265"), (r"\pi", "22/7"), ("x^{-1}", "-x"),
            ("|x|", "x"), (r"\log_2 8", r"\log_8 2"), (r"\frac{x}{2}", "x"), ("2^3", "6"), ("x_1", "x_2"),
            (r"2\frac12+x", "1+x"), ("e^x", "x^e"), (r"\sin x", r"\cos x"), ("f(2)+1", "2f+1"), ("fx", "f(x)"), ("2^3^2", "64"), ("1011_2", "1011"), ("a'", "a"),
        ),
        ((r"\int_0^1 2x\,dx", "1"), (r"\sum_{k=1}^{3} k", "6")),
    ),
    Kind(
        "empty and odd texts",
        (("...", "..."), ("?", "?")),
        (("", "0"), ("", ""), (" ", " "), ("{}", "0"), ("$", "5"), (r"\boxed{}", "0"), ("\\", "0")),
    ),
)  # fmt: skip

EQUAL = tuple(chain.from_iterable(kind.equal for kind in TABLE))
DIFFERENT = tuple(chain.from_iterable(kind.different for kind in TABLE))
UNRECOGNIZED = tuple(chain.from_iterable(kind.unrecognized for kind in TABLE))


def markdown() -> str:
    """Return the table of `docs/own_reward.md`."""
    rows = ["| answers | equal | different |", "| --- | --- | --- |"]
    for kind in TABLE:
        rows.append(f"| {kind.title} | {_cell(kind.equal)} | {_cell(kind.different)} |")
    missing = _cell(UNRECOGNIZED)
    return "\n".join([*rows, "", f"Equal, but not recognised, so scored as wrong: {missing}."])


def _cell(pairs: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f"{_code(one)} {_code(other)}" for one, other in pairs)


def _code(text: str) -> str:
    """Return a text as code in a cell of a table, shortened."""
    text = text if len(text) <= 60 else f"{text[:20]}... ({len(text)} characters)"
    fence = "``" if "`" in text else "`"
    padding = " " if "`" in text or text != text.strip() else ""
    return f"{fence}{padding}{text}{padding}{fence}".replace("|", "\\|") if text else "(empty)"


if __name__ == "__main__":
    print(markdown())
