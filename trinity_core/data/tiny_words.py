"""The words that the tiny word problems are made of, and the chat template of the tiny model."""

from __future__ import annotations

NAMES = (
    "Anna", "Ben", "Carla", "David", "Emma", "Felix", "Greta", "Hugo", "Ida", "Jonas", "Kira", "Leo",
    "Mia", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Uwe", "Vera", "Will", "Yara", "Zoe",
)  # fmt: skip

THINGS = (
    "apples", "books", "cards", "coins", "cups", "eggs", "flowers", "marbles", "pens", "shells", "stamps", "toys",
)  # fmt: skip

ADDITIONS = ("finds", "buys", "gets", "wins")

SUBTRACTIONS = ("loses", "sells", "drops", "lends", "mails", "breaks", "donates", "forgets")
"""The first is the one that worked examples use; the others are rare there."""

QUESTION = "{name} has {a} {thing} and {verb} {b}. How many {thing} does {name} have now?"

CALCULATE = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "The value of +, -, *, / and brackets.",
        "parameters": {
            "properties": {"expression": {"type": "string"}},
            "additionalProperties": False,
            "required": ["expression"],
            "type": "object",
        },
    },
}
"""The built-in tool of that name, as the model sees it."""

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
{{- 'Tools:' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n' + ((call.function or call) | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
