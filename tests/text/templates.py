"""Chat templates: in the manner of well-known families (jinja/), and small ones for one feature each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a <city> & more",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]

TEMPLATES = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "jinja").glob("*.jinja"))}

# name -> (template, a text that shows the feature worked)
SMALL_TEMPLATES = {
    "break": ("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}", "a<b"),
    "continue": ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}", "é"),
    "generation": ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", "a<bé"),
    "tojson": ("{{ messages | tojson }}", '"a<b"'),
    "tojson indent": ("{{ tools | tojson(indent=2) }}", '\n  {\n    "type"'),
    "tojson sorted": ("{{ tools[0] | tojson(sort_keys=true, separators=(',', ':')) }}", '{"function":{"description"'),
    "tojson ascii": ("{{ messages[1] | tojson(ensure_ascii=true) }}", "\\u00e9"),
    "trim blocks": ("{% if true %}\nx\n{% endif %}\n  {% if true %}\ny{% endif %}", "x\ny"),
    "namespace": (
        "{% set n = namespace(i=0) %}{% for m in messages %}{% set n.i = n.i + 1 %}{% endfor %}{{ n.i }}",
        "2",
    ),
    "namespace self": ("{% set n = namespace(self=3) %}{{ n.self }}", "3"),
    "dict": ("{% set d = dict(a=1) %}{{ d.a }}", "1"),
    "kwargs": ("{{ enable_thinking }}{{ bos_token }}{{ eos_token }}", "True<s></s>"),
    "strftime": ("{{ strftime_now('%%') }}", "%"),
    "macro": ("{% macro f(m) %}[{{ m.role }}]{% endmacro %}{% for m in messages %}{{ f(m) }}{% endfor %}", "[user]"),
    "recursion": (
        "{%- macro show(t) %}{% if t is mapping %}{% for k, v in t | dictsort %}{{ k }}({{ show(v) }}){% endfor %}"
        "{% else %}{{ t }}{% endif %}{% endmacro %}{{ show(tools[0]) }}",
        "type(function)",
    ),
}
