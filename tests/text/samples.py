"""Varied strings: code, scripts of the world, emoji with joiners, digits, runs of white space, special tokens."""

from __future__ import annotations

import random

HAND = [
    "",
    " ",
    "  ",
    "Hello world",
    " Hello  world ",
    "The quick brown fox, 3.14159 and 1,000,000.",
    "def f(x):\n    return x**2  # square\n\n\n\tif x:\r\n\t\tpass\n",
    '{"key": [1, 2, {"nested": null}], "s": "a\\nb"}',
    "日本語のテキストと漢字、カタカナ。",
    "中文字符测试，标点符号！",
    "한국어 텍스트 안녕하세요",
    "नमस्ते दुनिया क्षत्रिय ज्ञान",
    "مرحبا بالعالم ١٢٣",
    "Ωμέγα Привет мир ёжик",
    "👩‍👩‍👧‍👦 family 👍🏽 thumbs 🇩🇪 flag ❤️‍🔥",
    "e\u0301 combining vs é",
    "tabs\t\ttabs   spaces     \n \n  \n",
    "x" * 300,
    " " * 65,
    "\n" * 9,
    "don't we'll I'm you've SHE'S",
    "foo Ⅷ ½ ² ٣ 12 345",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𠜎𠜱",
    "\u200b\u200dzero\ufeffwidth",
    "https://example.com/a?b=c&d=%20#e",
    "▁underline▁ and <0x41> and <s> </s>",
]
_ALPHABETS = [
    "abcdefghijklmnopqrstuvwxyz ",
    "ABC xyz 0123456789 ",
    " \t\n\r ",
    "日本語中文字한국어あいう ",
    "नमस्तेदुनियाक्षज्ञ ",
    "👩👧‍🏽🇩🇪❤️🔥😀 ",
    "(){}[];:=+-*/<>\"'\\ _.,",
    "éüñçßøåǺ̈ ",
    "مرحبا١٢٣ ",
    "𝔘𝔫𠜎🜁 ",
]


def varied(count: int, seed: int = 0, extra: tuple[str, ...] = ()) -> list[str]:
    """`count` strings: the hand-written first, then mixtures of alphabets and of `extra` words."""
    rng = random.Random(seed)
    out = list(HAND)
    while len(out) < count:
        parts = []
        for _ in range(rng.randint(1, 6)):
            if extra and rng.random() < 0.2:
                parts.append(rng.choice(extra))
            else:
                alphabet = rng.choice(_ALPHABETS)
                parts.append("".join(rng.choices(alphabet, k=rng.randint(1, 12))))
        out.append("".join(parts))
    return out[:count]
