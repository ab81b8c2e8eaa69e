"""Texts of every kind that tokenizers cut in different ways."""

import itertools

WORDS = """Hello world
don't we'll I'VE they're he'd it's I'm
def f(x):\n\treturn x ** 2  # square\n
for (int i = 0; i < 10; ++i) { a[i] += b[i]; }
SELECT * FROM t WHERE id = 42;
3.14159 1,000,000 0x1F 2024-01-31 12:30
100% $5.00 €7 №8 ½ ² Ⅷ ٣٤ 三十
naïve café Ångström ﬁne e\u0301
Привет, мир! Γειά σου Κόσμε
你好，世界。日本語のテキスト 한국어
مرحبا بالعالم שלום नमस्ते ไทย
😀👍🏽👨\u200d👩\u200d👧 🇫🇷
https://example.org/a?b=c&d=e#f
a_b-c/d\\e|f~g`h
<b>bold</b> {{x}} [[y]] ((z))
!!! ??? ... --- ===
\u00a0\u2003\u200b\ufeff
CamelCase snake_case UPPER lower
\x00\x07\x1b[0m
<|im_start|>user<|im_end|>""".splitlines()
SPACES = ("", " ", "  ", "   ", "\n", "\n\n", " \n", "\t", "\r\n", " \t ", "\n  \n ")


def varied_texts():
    """Pieces of every kind behind, before and between spaces of every kind."""
    pairs = zip(itertools.cycle(WORDS), itertools.product(SPACES, SPACES, range(2)), strict=False)
    texts = [f"{left}{word}{right}{WORDS[i]}" for word, (left, right, i) in pairs]
    return texts + WORDS + [space * 7 for space in SPACES]
