"""The text extracted from a page."""

from mega_agentrl.tool.browse.page_fetcher import Page
from mega_agentrl.tool.browse.text_extraction import MAX_TEXT_CHARS, extract_page_text

ARTICLE = """<html><head><title>T</title><script>evil()</script><style>p {{}}</style></head><body>
<nav><a href="/">Home</a><a href="/x">Menu</a></nav>
<article><h1>Otters</h1><p>{0}</p><p>They sleep holding hands in the water, all of them.</p>
</article>
<footer>Imprint</footer></body></html>"""


def text(body, media_type="text/html", charset=""):
    return extract_page_text(
        Page(url_chain=("http://x/",), media_type=media_type, charset=charset, body=body)
    )


def test_the_main_text_without_menus_and_scripts():
    shown = text(ARTICLE.format("Otters eat many clams and fish every day. " * 8).encode())
    assert "holding hands" in shown
    assert "evil()" not in shown
    assert "Menu" not in shown


def test_a_page_without_main_text_gives_what_it_has():
    assert "tiny" in text(b"<html><body><div><span>tiny</span></div></body></html>")


def test_charsets():
    umlauts = "Füchse und Bären sind scheu und leben im Wald. " * 8
    for charset in ("utf-8", "latin-1", "utf-16"):
        assert "Bären" in text(ARTICLE.format(umlauts).encode(charset), charset=charset)
    assert "Bären" in text(ARTICLE.format(umlauts).encode(), charset="no-such-charset")
    assert "Bären" in text(ARTICLE.format(umlauts).encode())


def test_plain_kinds_are_taken_as_they_are():
    assert text(b" <b>x</b> \n", "text/plain") == "<b>x</b>"
    assert text(b'{"a": 1}', "application/json", "utf-8") == '{"a": 1}'
    assert text(b"\xff", "text/plain") == "\ufffd"


def test_nothing_to_read_is_empty():
    for body in (b"", b"   ", b"<html></html>", b"\0\0", b"<!-- -->"):
        assert text(body).strip("\0") == ""


def test_a_text_has_a_limit():
    assert len(text(b"x " * MAX_TEXT_CHARS, "text/plain")) == MAX_TEXT_CHARS
